"""Source of the kernel that samples several tokens in a row: all passes, phase by phase."""

# One head's query or key of a row, by one warp, normed and rotated; `write` takes (index, value).
HEADS = """
template <int DIM, bool IS_NORMED, class Write>
__device__ inline void rotate_head(
    const __nv_bfloat16* head, const __nv_bfloat16* factors, float eps, const float* angles,
    Write write) {
    constexpr int HALF = DIM / 2, PAIRS = HALF / 32;
    const int lane = threadIdx.x % 32;
    float one[PAIRS], two[PAIRS], norm = 1;
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        one[n] = number(head + n * 32 + lane);
        two[n] = number(head + HALF + n * 32 + lane);
    }
    if (IS_NORMED) {
        float square = 0;
#pragma unroll
        for (int n = 0; n < PAIRS; n++) square += one[n] * one[n] + two[n] * two[n];
        for (int n = 16; n; n /= 2) square += __shfl_xor_sync(0xffffffff, square, n);
        norm = rsqrtf(square / DIM + eps);
    }
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const int i = n * 32 + lane;
        float a = one[n], b = two[n];
        if (IS_NORMED) {
            a *= norm * float(factors[i]);
            b *= norm * float(factors[i + HALF]);
        }
        const float cosine = angles[i], sine = angles[i + HALF];
        write(i, a * cosine - b * sine);
        write(i + HALF, b * cosine + a * sine);
    }
}
"""

# Attends with each row to a chunk of its tokens, by one block of threads for all query heads that
# share the keys; the last block of a row joins its chunks.
_ATTENTION = """
            for (int n = blockIdx.x; n < num_rows * NUM_KEYS * MAX_CHUNKS; n += gridDim.x) {
                const int chunk = n % MAX_CHUNKS, head = n / MAX_CHUNKS % NUM_KEYS;
                const int row = n / (MAX_CHUNKS * NUM_KEYS), length = row_places[row] + 1;
                const int size = (length + MAX_CHUNKS * PIECE - 1) / (MAX_CHUNKS * PIECE) * PIECE;
                const int num_chunks = (length + size - 1) / size;
                if (chunk >= num_chunks) continue;
                const int begin = chunk * size, end = min(begin + size, length);
                if (warp < SHARED) {
                    const int at = head * SHARED + warp;
                    rotate_head<DIM, HAS_NORMS>(
                        heads + row * ALL_HEADS + at * DIM, address(layer, 3), HEAD_EPS,
                        angles + row_places[row] * DIM,
                        [&](int i, float value) { query[warp][i] = float(T(value)) * FACTOR; });
                }
                if (!is_split && end == length && warp >= WARPS - 2) keep(row, head);
                if (threadIdx.x < SHARED) {
                    top_of[threadIdx.x] = -3.4e38f;
                    sum_of[threadIdx.x] = 0;
                }
                sync_warps();
                const int64_t* held = table + (int64_t(layer) * num_groups + row_seqs[row]) * 3;
                const int64_t from = int64_t(head) * held[2] * DIM;
                const T* key = reinterpret_cast<const T*>(held[0]) + from;
                const T* value = reinterpret_cast<const T*>(held[1]) + from;
                float mix[MIXED] = {};
                for (int base = begin; base < end; base += PIECE) {
                    constexpr int LANES = DIM / 8, AT_ONCE = 32 / LANES;
                    constexpr int ROUNDS = PIECE / (WARPS * AT_ONCE);
                    constexpr int COPIES = PIECE * LANES / THREADS;
                    uint4 k[ROUNDS], v[COPIES];
#pragma unroll
                    for (int i = 0; i < ROUNDS; i++) {
                        const int token = base + (i * WARPS + warp) * AT_ONCE + lane / LANES;
                        k[i] = load16(key + int64_t(min(token, end - 1)) * DIM + lane % LANES * 8);
                    }
#pragma unroll
                    for (int i = 0; i < COPIES; i++) {
                        const int m = i * THREADS + threadIdx.x, token = base + m / LANES;
                        v[i] = load16(value + int64_t(min(token, end - 1)) * DIM + m % LANES * 8);
                    }
#pragma unroll
                    for (int i = 0; i < ROUNDS; i++) {
                        const int place = (i * WARPS + warp) * AT_ONCE + lane / LANES;
                        const T* mine = reinterpret_cast<const T*>(&k[i]);
#pragma unroll
                        for (int h = 0; h < SHARED; h++) {
                            float dot = 0;
#pragma unroll
                            for (int j = 0; j < 8; j++)
                                dot += float(mine[j]) * query[h][lane % LANES * 8 + j];
#pragma unroll
                            for (int m = LANES / 2; m; m /= 2)
                                dot += __shfl_xor_sync(0xffffffff, dot, m);
                            if (lane % LANES == 0)
                                score[h][place] = base + place < end ? dot : -3.4e38f;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < COPIES; i++) {
                        const int m = i * THREADS + threadIdx.x;
                        *reinterpret_cast<uint4*>(&values[m / LANES][m % LANES * 8]) = v[i];
                    }
                    sync_warps();
                    if (warp < SHARED) {
                        float most = fmaxf(score[warp][lane], score[warp][lane + 32]);
                        for (int m = 16; m; m /= 2)
                            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, m));
                        const float before = top_of[warp];
                        most = fmaxf(most, before);
                        float total = 0;
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            const float weight = exp2f(score[warp][lane + 32 * m] - most);
                            score[warp][lane + 32 * m] = weight;
                            total += weight;
                        }
                        for (int m = 16; m; m /= 2) total += __shfl_xor_sync(0xffffffff, total, m);
                        __syncwarp();
                        if (lane == 0) {
                            shrink[warp] = exp2f(before - most);
                            sum_of[warp] = sum_of[warp] * exp2f(before - most) + total;
                            top_of[warp] = most;
                        }
                    }
                    sync_warps();
#pragma unroll
                    for (int m = 0; m < MIXED; m++) {
                        const int o = m * THREADS + threadIdx.x, h = o / DIM, d = o % DIM;
                        if (o >= SHARED * DIM) break;
                        float mixed = mix[m] * shrink[h];
#pragma unroll 16
                        for (int t = 0; t < PIECE; t++) mixed += score[h][t] * float(values[t][d]);
                        mix[m] = mixed;
                    }
                    sync_warps();
                }
                T* out = attended + row * WIDE + head * SHARED * DIM;
                if (num_chunks == 1) {
#pragma unroll
                    for (int m = 0; m < MIXED; m++) {
                        const int o = m * THREADS + threadIdx.x;
                        if (o < SHARED * DIM) out[o] = T(mix[m] / sum_of[o / DIM]);
                    }
                    sync_warps();
                    continue;
                }
                const int group = row * NUM_KEYS + head, at = group * MAX_CHUNKS;
#pragma unroll
                for (int m = 0; m < MIXED; m++) {
                    const int o = m * THREADS + threadIdx.x;
                    if (o < SHARED * DIM) mixes[(at + chunk) * SHARED * DIM + o] = mix[m];
                }
                if (threadIdx.x < SHARED) {
                    tops[(at + chunk) * SHARED + threadIdx.x] = top_of[threadIdx.x];
                    totals[(at + chunk) * SHARED + threadIdx.x] = sum_of[threadIdx.x];
                }
                __threadfence();
                sync_warps();
                if (threadIdx.x == 0)
                    is_last_chunk = atomicAdd(num_done + group, 1u) == unsigned(num_chunks - 1);
                sync_warps();
                if (is_last_chunk) {  // joins the row's chunks
                    __threadfence();
                    if (threadIdx.x == 0) num_done[group] = 0;
#pragma unroll
                    for (int m = 0; m < MIXED; m++) {
                        const int o = m * THREADS + threadIdx.x, h = o / DIM;
                        if (o >= SHARED * DIM) break;
                        float most = -3.4e38f, total = 0, mixed = 0;
                        for (int i = 0; i < num_chunks; i++)
                            most = fmaxf(most, __ldcg(tops + (at + i) * SHARED + h));
                        for (int i = 0; i < num_chunks; i++) {
                            const float weight = exp2f(__ldcg(tops + (at + i) * SHARED + h) - most);
                            total += weight * __ldcg(totals + (at + i) * SHARED + h);
                            mixed += weight * __ldcg(mixes + (at + i) * SHARED * DIM + o);
                        }
                        out[o] = T(mixed / total);
                    }
                }
                sync_warps();
            }
"""

_PASSES = """
    constexpr int SHARED = NUM_HEADS / NUM_KEYS, WIDE = NUM_HEADS * DIM;
    constexpr int ALL_HEADS = WIDE + 2 * NUM_KEYS * DIM;
    constexpr int MIXED = (SHARED * DIM + THREADS - 1) / THREADS;
    constexpr float FACTOR = SCALE * 1.44269504f;  // for exponents of two
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned long long begun = nanoseconds();

    const int4* rows = reinterpret_cast<const int4*>(given);  // sequence, position and token
    const int* ends = given + 4 * num_first;  // of each sequence: its last row, and its position
    const float* draws = reinterpret_cast<const float*>(ends + 2 * num_seqs);

    // MLX supports no kernels that write to their inputs; nothing else uses these arrays.
    T* hidden = const_cast<T*>(buffers);
    T* hidden2 = hidden + MAX_ROWS * HIDDEN;
    T* heads = hidden2 + MAX_ROWS * HIDDEN;
    T* attended = heads + MAX_ROWS * ALL_HEADS;
    T* inner = attended + MAX_ROWS * WIDE;
    float* mixes = const_cast<float*>(floats);
    float* tops = mixes + MAX_ROWS * NUM_KEYS * MAX_CHUNKS * SHARED * DIM;
    float* totals = tops + MAX_ROWS * NUM_KEYS * MAX_CHUNKS * SHARED;
    float* block_sums = totals + MAX_ROWS * NUM_KEYS * MAX_CHUNKS * SHARED;
    float* logits = block_sums + MAX_ROWS * MAX_BLOCKS;
    unsigned* words = const_cast<unsigned*>(state);
    unsigned* num_done = words + 4;
    int* chosen = reinterpret_cast<int*>(num_done + MAX_ROWS * NUM_KEYS);
    auto* cells = reinterpret_cast<unsigned long long*>(const_cast<int64_t*>(winners));

    auto address = [&](int layer, int field) {
        return reinterpret_cast<const T*>(weights[layer * FIELDS + field]);
    };

    __shared__ int row_tokens[MAX_ROWS], row_places[MAX_ROWS], row_seqs[MAX_ROWS];
    __shared__ float query[SHARED][DIM], score[SHARED][PIECE], shrink[SHARED], sum_of[SHARED];
    __shared__ float top_of[SHARED];
    __shared__ __align__(16) T values[PIECE][DIM];
    __shared__ float scan[THREADS], scratch[2 * WARPS * TILES * 8 * (16 + 4 + 1)];
    __shared__ bool is_last_chunk;

    extern __shared__ __align__(128) char dynamic[];
    __shared__ __align__(8) Int64 full[NUM_TILES], empty[NUM_TILES];
    __shared__ bool has_stopped;
    Ring ring{dynamic, full, empty, NUM_TILES};
    Barrier barrier{words};
    if (__ldcg(words + 2)) {
        if (blockIdx.x == 0)
            for (int n = threadIdx.x; n <= count * num_seqs; n += THREADS) tokens[n] = -1;
        return;
    }
    if (threadIdx.x == 0) {
        has_stopped = false;
        for (int n = 0; n < NUM_TILES; n++) {
            init_signal(full + n, 1);
            init_signal(empty + n, WARPS);
        }
    }
    __syncthreads();
    if (warp == WARPS) {
        const volatile bool* stop = &has_stopped;
        for (int step = 0; step < count; step++) {
            bool is_on = true;
            for (int layer = 0; is_on && layer < LAYERS; layer++)
                is_on = copy_strips<HIDDEN, ALL_HEADS, false>(ring, address(layer, 1), stop) &&
                        copy_strips<WIDE, HIDDEN, false>(ring, address(layer, 5), stop) &&
                        copy_strips<HIDDEN, INNER, true>(ring, address(layer, 7), stop) &&
                        copy_strips<INNER, HIDDEN, false>(ring, address(layer, 8), stop);
            is_on = is_on && copy_strips<HIDDEN, VOCAB, false>(ring, address(LAYERS, 1), stop);
            if (!is_on) {
                __nanosleep(1000000);  // the last copies end before the block does
                break;
            }
        }
        return;
    }
    if (blockIdx.x == 0)
        for (int n = threadIdx.x; n < MAX_STEPS * MAX_ROWS; n += THREADS) {
            cells[n] = 0;
            chosen[n] = -1;
        }
    if (threadIdx.x < num_first) {
        const int4 row = rows[threadIdx.x];
        row_seqs[threadIdx.x] = row.x;
        row_places[threadIdx.x] = row.y;
        row_tokens[threadIdx.x] = row.z;
    }
    sync_warps();

    int num_rows = num_first;
    for (int step = 0; step < count; step++) {
        const bool is_split = num_rows > num_seqs;  // several tokens of one sequence
        for (int layer = 0; layer < LAYERS; layer++) {
            auto input_row = [&](int row) -> const T* {
                return layer ? hidden + row * HIDDEN
                             : address(LAYERS, 2) + int64_t(row_tokens[row]) * HIDDEN;
            };
            auto write_heads = [&](int row, int place, float value) {
                if (HAS_BIAS) value += float(address(layer, 2)[place]);
                heads[row * ALL_HEADS + place] = T(value);
            };
            if (!multiply_strips<HIDDEN, ALL_HEADS, true, false, TILES>(
                    ring, barrier, scratch, address(layer, 0), EPS, num_rows, input_row,
                    write_heads))
                break;
            barrier.arrive();
            if (!barrier.wait()) break;

            // -- new keys and values --------------------------------------------------------------
            auto keep = [&](int row, int head) {  // two warps
                const int64_t* held = table + (int64_t(layer) * num_groups + row_seqs[row]) * 3;
                const int64_t at = (int64_t(head) * held[2] + row_places[row]) * DIM;
                const T* key = heads + row * ALL_HEADS + WIDE + head * DIM;
                if (warp % 2 == 0) {
                    T* to = reinterpret_cast<T*>(held[0]) + at;
                    rotate_head<DIM, HAS_NORMS>(
                        key, address(layer, 4), HEAD_EPS, angles + row_places[row] * DIM,
                        [&](int i, float value) { to[i] = T(value); });
                } else {
                    T* to = reinterpret_cast<T*>(held[1]) + at;
                    for (int i = lane; i < DIM; i += 32)
                        to[i] = T(number(key + NUM_KEYS * DIM + i));
                }
            };
            if (is_split) {
                for (int n = blockIdx.x; n < num_rows * NUM_KEYS; n += gridDim.x)
                    if (warp < 2) keep(n / NUM_KEYS, n % NUM_KEYS);
                barrier.arrive();
                if (!barrier.wait()) break;
            }

ATTENTION            barrier.arrive();

            // -- the rest of the layer ------------------------------------------------------------
            const bool is_done =
                multiply_strips<WIDE, HIDDEN, false, false, TILES>(
                    ring, barrier, scratch, nullptr, 0, num_rows,
                    [&](int row) -> const T* { return attended + row * WIDE; },
                    [&](int row, int place, float value) {
                        hidden2[row * HIDDEN + place] = T(value + number(input_row(row) + place));
                    }) &&
                (barrier.arrive(), true) &&
                multiply_strips<HIDDEN, INNER, true, true, TILES>(
                    ring, barrier, scratch, address(layer, 6), EPS, num_rows,
                    [&](int row) -> const T* { return hidden2 + row * HIDDEN; },
                    [&](int row, int place, float value) {
                        inner[row * INNER + place] = T(value);
                    }) &&
                (barrier.arrive(), true) &&
                multiply_strips<INNER, HIDDEN, false, false, TILES>(
                    ring, barrier, scratch, nullptr, 0, num_rows,
                    [&](int row) -> const T* { return inner + row * INNER; },
                    [&](int row, int place, float value) {
                        hidden[row * HIDDEN + place] =
                            T(value + number(hidden2 + row * HIDDEN + place));
                    });
            if (!is_done) break;
            barrier.arrive();
        }
        if (barrier.is_broken) break;

        // -- the next tokens ----------------------------------------------------------------------
        unsigned long long best = 0;
        const bool is_done = multiply_strips<HIDDEN, VOCAB, true, false, TILES>(
            ring, barrier, scratch, address(LAYERS, 0), EPS, num_rows,
            [&](int row) -> const T* { return hidden + row * HIDDEN; },
            [&](int row, int place, float value) {
                value = float(T(value));
                const unsigned long long key = sortable(value, place);
                best = key > best ? key : best;
                if (is_sampled) logits[int64_t(row) * VOCAB + place] = value;
            });
        if (!is_done) break;
        for (int m = 8; m; m /= 2) {
            const unsigned long long other = __shfl_xor_sync(0xffffffff, best, m);
            best = other > best ? other : best;
        }
        if (threadIdx.x % 16 == 0 && threadIdx.x / 16 < num_rows)
            atomicMax(cells + step * MAX_ROWS + threadIdx.x / 16, best);
        barrier.arrive();
        if (!barrier.wait()) break;

        if (is_sampled) {
            const int share = (VOCAB + gridDim.x - 1) / gridDim.x;
            const int begin = min(int(blockIdx.x) * share, VOCAB), end = min(begin + share, VOCAB);
            const int own = (share + THREADS - 1) / THREADS;
            const int mine = min(begin + int(threadIdx.x) * own, end), past = min(mine + own, end);
            for (int pass = 0; pass < 2; pass++) {
                for (int seq = 0; seq < num_seqs; seq++) {
                    const float heat = draws[(step * num_seqs + seq) * 2];
                    if (heat <= 0) continue;
                    const int row = step ? seq : ends[seq * 2];
                    const float most = sorted_value(__ldcg(cells + step * MAX_ROWS + row));
                    const float* own_logits = logits + int64_t(row) * VOCAB;
                    float total = 0;
                    for (int i = mine; i < past; i++)
                        total += expf((__ldcg(own_logits + i) - most) / heat);
                    scan[threadIdx.x] = total;
                    sync_warps();
                    for (int m = 1; m < THREADS; m *= 2) {
                        const float more = threadIdx.x >= m ? scan[threadIdx.x - m] : 0;
                        sync_warps();
                        scan[threadIdx.x] += more;
                        sync_warps();
                    }
                    if (pass == 0) {
                        if (threadIdx.x == 0)
                            block_sums[seq * MAX_BLOCKS + blockIdx.x] = scan[THREADS - 1];
                        sync_warps();
                        continue;
                    }
                    float before = 0, everything = 0;
                    for (int i = 0; i < int(gridDim.x); i++) {
                        const float part = __ldcg(block_sums + seq * MAX_BLOCKS + i);
                        before += i < int(blockIdx.x) ? part : 0;
                        everything += part;
                    }
                    const float point = draws[(step * num_seqs + seq) * 2 + 1] * everything;
                    float reached = before + scan[threadIdx.x] - total;
                    const bool is_over = blockIdx.x + 1 == gridDim.x && threadIdx.x + 1 == THREADS;
                    if (reached <= point || (blockIdx.x == 0 && threadIdx.x == 0)) {
                        int token = -1;
                        for (int i = mine; i < past && token < 0; i++) {
                            reached += expf((__ldcg(own_logits + i) - most) / heat);
                            if (reached > point) token = i;
                        }
                        if (token < 0 && is_over) token = VOCAB - 1;
                        if (token >= 0) atomicMax(chosen + step * MAX_ROWS + seq, token);
                    }
                    sync_warps();
                }
                barrier.arrive();
                if (!barrier.wait()) break;
            }
            if (barrier.is_broken) break;
        }
        sync_warps();
        if (threadIdx.x < num_seqs) {
            const int seq = threadIdx.x, row = step ? seq : ends[seq * 2];
            const unsigned long long key = __ldcg(cells + step * MAX_ROWS + row);
            const int drawn = is_sampled ? __ldcg(chosen + step * MAX_ROWS + seq) : -1;
            const int token = drawn >= 0 ? drawn : int(0xffffffffu - unsigned(key));
            if (blockIdx.x == 0) tokens[step * num_seqs + seq] = token;
            row_seqs[seq] = seq;
            row_places[seq] = ends[seq * 2 + 1] + step + 1;
            row_tokens[seq] = min(max(token, 0), VOCAB - 1);
        }
        sync_warps();
        num_rows = num_seqs;
    }
    if (barrier.is_broken) {
        if (threadIdx.x == 0) *const_cast<volatile bool*>(&has_stopped) = true;
        if (blockIdx.x == 0)
            for (int n = threadIdx.x; n <= count * num_seqs; n += THREADS) tokens[n] = -1;
        return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        tokens[count * num_seqs] = int((nanoseconds() - begun) / 1000);
    if (threadIdx.x == 0 && atomicAdd(words + 1, 1u) == gridDim.x - 1) {
        words[0] = words[1] = 0;  // all blocks have left the last barrier
        __threadfence();
    }
"""

SOURCE = _PASSES.replace("ATTENTION", _ATTENTION)
