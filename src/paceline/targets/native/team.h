// How the threads of a pass share its work. A pass is a sequence of steps that all threads go through; a step is a
// number of jobs, and over when all its jobs are done - not when all threads have arrived, as with OpenMP's barriers:
// on a busy machine, where a thread may not run for milliseconds, the others go on without it, and it passes over the
// steps it missed.
//
// Jobs that lie side by side read memory that does. So each thread has a share of a step's jobs that lie together, and
// takes them from the front: it reads one stream, knows what it will read next, and shares no cache line with another
// thread, which on a processor of many cores costs as much as a small job. Who has done its share takes jobs from the
// back of others'.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline::PACELINE_ISA {

constexpr int MOST_THREADS = 256;

// Of all threads. A share's word is step << 40 | batches taken from its front << 20 | from its back.
struct Progress {
    struct alignas(64) Share {
        std::atomic<uint64_t> taken{0};
    };
    alignas(64) std::atomic<uint64_t> step{0};
    alignas(64) std::atomic<int> done{0};  // batches of the step
    Share shares[MOST_THREADS];
};

// A parallel region costs some microseconds, and on a busy machine much more: too little work is not worth it.
inline int team_size(int threads, int64_t multiplications) {
    return multiplications < 200'000 ? 1 : std::min(threads, MOST_THREADS);
}

class Team {  // one thread's view
  public:
    Team(Progress& progress, int threads, int thread) : threads(threads), thread(thread), progress_(progress) {}

    const int threads, thread;

    // The share of `count` things that this thread begins with.
    int first(int count) const { return (int64_t)count * thread / threads; }

    // One step: job(i, next) for i = 0 .. jobs - 1, each once, taken in batches of `grain` at least. All threads must
    // call it alike. `next` is the job that this thread will probably be given after i; -1: none.
    template <class Job>
    void each(int jobs, int grain, Job job) {
        if (jobs <= 0) return;
        grain = std::max(grain, jobs / MOST + 1);
        const int batches = (jobs + grain - 1) / grain;
        const uint64_t step = step_++;
        int mine = 0;
        for (int i = 0; i < threads; i++) {
            const int share = (thread + i) % threads;
            const int first = (int64_t)batches * share / threads, last = (int64_t)batches * (share + 1) / threads;
            for (int batch; (batch = take(share, last - first, step, i > 0)) >= 0; mine++) {
                const int from = (first + batch) * grain, to = std::min(from + grain, jobs);
                for (int k = from; k < to; k++) job(k, k + 1 < to ? k + 1 : i || batch + 1 == last - first ? -1 : to);
            }
        }
        if (mine && progress_.done.fetch_add(mine, std::memory_order_acq_rel) + mine == batches) {
            progress_.done.store(0, std::memory_order_relaxed);
            for (int i = 0; i < threads; i++)
                progress_.shares[i].taken.store((step + 1) << 40, std::memory_order_relaxed);
            progress_.step.store(step + 1, std::memory_order_release);
            return;
        }
        wait(step);
    }

  private:
    static constexpr int MOST = (1 << 20) - 1;  // batches of a step

    // A batch of a share of `count`, from its front or its back; -1: there is none left, or the step is over.
    int take(int share, int count, uint64_t step, bool back) {
        std::atomic<uint64_t>& taken = progress_.shares[share].taken;
        uint64_t seen = taken.load(std::memory_order_acquire);
        while (seen >> 40 == step) {
            const int front = seen >> 20 & MOST, behind = seen & MOST;
            if (front + behind >= count) return -1;
            if (taken.compare_exchange_weak(seen, seen + (back ? 1 : 1 << 20), std::memory_order_acq_rel))
                return back ? count - 1 - behind : front;
        }
        return -1;
    }

    void wait(uint64_t step) {
        for (int turn = 0; progress_.step.load(std::memory_order_acquire) <= step; turn++)
            if (turn > 2000) std::this_thread::yield();  // whoever we wait for may need our core
#if defined(__x86_64__)
            else _mm_pause();
#endif
    }

    Progress& progress_;
    uint64_t step_ = 0;
};

}  // namespace paceline::PACELINE_ISA
