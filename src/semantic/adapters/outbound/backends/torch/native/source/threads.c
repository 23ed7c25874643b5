/* Threads are created once and sleep between jobs. Within a job they wait at barriers: they spin for
 * a quarter of a millisecond, as waking takes a tenth, and then sleep. On a busy
 * machine, a thread that slept is scheduled first when it wakes; one that spun has used up its slice.
 *
 * Memory order. A job's fields are written before `generation` changes and read after it was seen
 * to change; `generation` also carries the number of threads, so a thread that is not in a job never
 * reads the fields. The next job is published only after all threads of the last have decremented
 * `working`. A sleeper increments `sleepers` and then reads the word it waits for; a waker writes
 * the word and then reads `sleepers`. Both are sequentially consistent, so at least one of them sees
 * the other's write.
 */
#include "threads.h"

#include <stdint.h>

#include "vectors.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <pthread.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* ---- the operating system -------------------------------------------------------------------- */

#if defined(_WIN32)

static SRWLOCK one_job = SRWLOCK_INIT;
static void lock_pool(void) { AcquireSRWLockExclusive(&one_job); }
static void unlock_pool(void) { ReleaseSRWLockExclusive(&one_job); }
static void sleep_while(atomic_int *word, int value) {
    WaitOnAddress((volatile void *)word, &value, sizeof value, INFINITE);
}
static void wake_all(atomic_int *word) { WakeByAddressAll((void *)word); }

static void work(int index);
static DWORD WINAPI enter(void *index) {
    work((int)(intptr_t)index);
    return 0;
}
static int start_thread(int index) {
    HANDLE thread = CreateThread(NULL, 0, enter, (void *)(intptr_t)index, 0, NULL);
    if (thread) CloseHandle(thread);
    return thread != NULL;
}

#else

static pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER;
static void lock_pool(void) { pthread_mutex_lock(&one_job); }
static void unlock_pool(void) { pthread_mutex_unlock(&one_job); }

#if defined(__linux__)
static void sleep_while(atomic_int *word, int value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}
static void wake_all(atomic_int *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}
#elif defined(__APPLE__)
/* os_sync_wait_on_address calls these; it is public, but only from macOS 14.4 on. */
extern int __ulock_wait(uint32_t operation, void *address, uint64_t value, uint32_t timeout_us);
extern int __ulock_wake(uint32_t operation, void *address, uint64_t value);
enum { UL_COMPARE_AND_WAIT = 1, ULF_WAKE_ALL = 0x100 };
static void sleep_while(atomic_int *word, int value) {
    __ulock_wait(UL_COMPARE_AND_WAIT, (void *)word, (uint32_t)value, 0);
}
static void wake_all(atomic_int *word) {
    __ulock_wake(UL_COMPARE_AND_WAIT | ULF_WAKE_ALL, (void *)word, 0);
}
#else
#include <sched.h>
static void sleep_while(atomic_int *word, int value) { (void)word, (void)value, sched_yield(); }
static void wake_all(atomic_int *word) { (void)word; }
#endif

static void work(int index);
static void *enter(void *index) {
    work((int)(intptr_t)index);
    return NULL;
}
static int start_thread(int index) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, enter, (void *)(intptr_t)index)) return 0;
    pthread_detach(thread);
    return 1;
}

#endif

/* ---- waiting --------------------------------------------------------------------------------- */

/* Wait until a word differs from `value`. */
static void await_change(atomic_int *word, int value, atomic_int *sleepers, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return;
        cpu_pause();
    }
    atomic_fetch_add(sleepers, 1);
    while (atomic_load(word) == value) sleep_while(word, value);
    atomic_fetch_sub(sleepers, 1);
}

/* Wake sleepers, after the word was changed. */
static void wake(atomic_int *word, atomic_int *sleepers) {
    if (atomic_load(sleepers)) wake_all(word);
}

void barrier(Team *team) {
    if (team->count == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    int phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add(&team->arrived, 1) == team->count - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store(&team->phase, phase + 1);
        wake(&team->phase, &team->sleepers);
    } else {
        await_change(&team->phase, phase, &team->sleepers, SPINS);
    }
}

/* ---- the pool -------------------------------------------------------------------------------- */

enum { COUNT_BITS = 8, COUNT_MASK = (1 << COUNT_BITS) - 1, IDLE_SPINS = SPINS / 16 };

static struct {
    _Alignas(64) atomic_int generation; /* a job's number, and in its low bits its threads */
    _Alignas(64) atomic_int working;    /* threads that have not finished it */
    _Alignas(64) atomic_int idle, waiting; /* sleepers on the two above */
    int started;
    int seen[MAX_THREADS]; /* the generation when each thread was started */
    Job job;
    void *argument;
    Team team;
} pool;

static void work(int index) {
    int seen = pool.seen[index];
    for (;;) {
        await_change(&pool.generation, seen, &pool.idle, IDLE_SPINS);
        seen = atomic_load(&pool.generation);
        if (index >= (seen & COUNT_MASK)) continue;
        pool.job(pool.argument, &pool.team, index);
        if (atomic_fetch_sub(&pool.working, 1) == 1) wake(&pool.working, &pool.waiting);
    }
}

int limit_threads(int threads) {
    return threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
}

void run_job(Job job, void *argument, int threads) {
    lock_pool();
    threads = limit_threads(threads);
    while (pool.started < threads - 1) {
        pool.seen[pool.started + 1] = atomic_load(&pool.generation);
        if (!start_thread(pool.started + 1)) break;
        pool.started++;
    }
    if (threads > pool.started + 1) threads = pool.started + 1;
    Team *team = &pool.team;
    team->count = threads;
    atomic_store(&team->next, 0);
    if (threads > 1) {
        unsigned number = ((unsigned)atomic_load(&pool.generation) >> COUNT_BITS) + 1;
        pool.job = job, pool.argument = argument;
        atomic_store(&pool.working, threads - 1);
        atomic_store(&pool.generation, (int)(number << COUNT_BITS | (unsigned)threads));
        wake(&pool.generation, &pool.idle);
    }
    job(argument, team, 0);
    if (threads > 1)
        for (int left; (left = atomic_load(&pool.working));)
            await_change(&pool.working, left, &pool.waiting, SPINS);
    unlock_pool();
}
