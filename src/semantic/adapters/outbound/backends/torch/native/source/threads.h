/* A pool of threads that run one job together, in phases. */
#ifndef SEMANTIC_THREADS_H
#define SEMANTIC_THREADS_H

#include <stdatomic.h>

enum { MAX_THREADS = 64 };

/* The threads of one job. Each phase hands out its pieces with `take` and ends with `barrier`. */
typedef struct {
    int count;
    _Alignas(64) atomic_int next;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int phase;
    _Alignas(64) atomic_int sleepers;
} Team;

/* Every thread of the team calls the job once; `index` is from 0 to `team->count - 1`. */
typedef void (*Job)(void *argument, Team *team, int index);

/* Run a job on up to `threads` threads, the caller's among them; returns when all are done. Jobs of
 * several callers run one after the other. */
void run_job(Job job, void *argument, int threads);

/* How many threads `run_job` would use, which a job's scratch memory is sized for. */
int limit_threads(int threads);

/* Wait until all threads of the team have arrived; the next phase's pieces start at 0. */
void barrier(Team *team);

/* The first of the next `size` pieces of a phase, or -1 when all `total` are taken. */
static inline int take(Team *team, int total, int size) {
    int start = atomic_fetch_add_explicit(&team->next, size, memory_order_relaxed);
    return start < total ? start : -1;
}

#endif
