// How the threads of a pass share its work. A pass is a sequence of steps that all threads go through; a step is a
// number of jobs, and over when all its jobs are done - not when all threads have arrived, as with OpenMP's barriers:
// on a busy machine, where a thread may not run for milliseconds, the others go on without it, and it passes over the
// steps it missed.
//
// Jobs that lie side by side read memory that does. So half of the threads take a step's jobs from the front, the
// other half from the back, until they meet: two threads each read one stream, and know what they will read next.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline::PACELINE_ISA {

struct Progress {  // of all threads
    alignas(64) std::atomic<uint64_t> next{0};  // step << 40 | batches taken from the front << 20 | from the back
    alignas(64) std::atomic<int> done{0};       // batches of the step
};

// A parallel region costs some microseconds, and on a busy machine much more: too little work is not worth it.
inline int team_size(int threads, int64_t multiplications) { return multiplications < 200'000 ? 1 : threads; }

class Team {  // one thread's view
  public:
    Team(Progress& progress, int threads, int thread)
        : threads(threads), progress_(progress), back_(thread % 2 == 1) {}

    const int threads;

    // One step: job(i, next) for i = 0 .. jobs - 1, each once, taken in batches of `grain` at least. All threads must
    // call it alike. `next` is the job that this thread will probably be given after i; it may lie outside the range.
    template <class Job>
    void each(int jobs, int grain, Job job) {
        if (jobs <= 0) return;
        grain = std::max(grain, jobs / MOST + 1);
        const int batches = (jobs + grain - 1) / grain;
        const uint64_t step = step_++;
        uint64_t seen = progress_.next.load(std::memory_order_acquire);
        while (seen >> 40 == step) {
            const int front = seen >> 20 & MOST, back = seen & MOST;
            if (front + back >= batches) return wait(step);
            const uint64_t taken = seen + (back_ ? 1 : 1 << 20);
            if (!progress_.next.compare_exchange_weak(seen, taken, std::memory_order_acq_rel)) continue;
            const int first = (back_ ? batches - 1 - back : front) * grain, last = std::min(first + grain, jobs);
            for (int i = first; i < last; i++) job(i, i + 1 < last ? i + 1 : back_ ? first - grain : last);
            if (progress_.done.fetch_add(1, std::memory_order_acq_rel) + 1 == batches) {
                progress_.done.store(0, std::memory_order_relaxed);
                progress_.next.store((step + 1) << 40, std::memory_order_release);
                return;
            }
            seen = progress_.next.load(std::memory_order_acquire);
        }
    }

  private:
    static constexpr int MOST = (1 << 20) - 1;  // batches of a step

    void wait(uint64_t step) {
        for (int turn = 0; progress_.next.load(std::memory_order_acquire) >> 40 == step; turn++)
            if (turn > 2000) std::this_thread::yield();  // whoever we wait for may need our core
#if defined(__x86_64__)
            else _mm_pause();
#endif
    }

    Progress& progress_;
    const bool back_;
    uint64_t step_ = 0;
};

}  // namespace paceline::PACELINE_ISA
