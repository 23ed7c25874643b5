/* Whether this CPU and operating system can run a variant; compiled without the variant's own flags,
 * so that it can be called anywhere. SEMANTIC_VARIANT is the variant's name. */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)

#include <cpuid.h>

/* Registers whose content the operating system saves: bits 1 and 2 are SSE and AVX, 5 to 7 AVX-512. */
static uint64_t saved_registers(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (uint64_t)d << 32 | a;
}

static int has_avx2(void) {
    uint32_t a, b, c, d;
    if ((saved_registers() & 6) != 6 || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!(c >> 12 & 1) || !(c >> 29 & 1)) return 0; /* FMA, F16C */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 5 & 1);
}

static int has_avxvnni(void) {
    uint32_t a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

static int has_avx512vnni(void) {
    uint32_t a, b, c, d;
    if (!has_avx2() || (saved_registers() & 0xe6) != 0xe6) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    /* F, DQ, CD, BW, VL: what -march=cascadelake may use; then VNNI */
    uint32_t needed = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
    return (b & needed) == needed && (c >> 11 & 1);
}

static int supports(const char *variant) {
    if (!strcmp(variant, "avx2")) return has_avx2();
    if (!strcmp(variant, "avxvnni")) return has_avxvnni();
    return !strcmp(variant, "avx512vnni") && has_avx512vnni();
}

#elif defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>
static int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
static int has_i8mm(void) { return getauxval(AT_HWCAP2) >> 13 & 1; }
#elif defined(__APPLE__)
#include <sys/sysctl.h>
static int has_feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(name, &value, &size, 0, 0) && value;
}
static int has_dotprod(void) { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
static int has_dotprod(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif

static int supports(const char *variant) {
    if (!strcmp(variant, "dotprod")) return has_dotprod();
    return !strcmp(variant, "i8mm") && has_dotprod() && has_i8mm();
}

#else

static int supports(const char *variant) {
    (void)variant;
    return 0;
}

#endif

int semantic_supported(void) {
    return !strcmp(SEMANTIC_VARIANT, "scalar") || supports(SEMANTIC_VARIANT);
}
