// How the threads of a pass share its work. A pass is a sequence of steps that all threads go through; a step is a
// number of jobs, taken one by one by whoever is free, and over when all its jobs are done - not when all threads have
// arrived, as with OpenMP's barriers: on a busy machine, where a thread may not run for milliseconds, the others
// go on without it, and it passes over the steps it missed.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {

struct Progress {  // of all threads
    alignas(64) std::atomic<uint64_t> next{0};  // step << 32 | its first job nobody has taken
    alignas(64) std::atomic<int> done{0};       // jobs of the step
};

// A parallel region costs some microseconds, and on a busy machine much more: too little work is not worth it.
inline int team_size(int threads, int64_t multiplications) { return multiplications < 200'000 ? 1 : threads; }

class Team {  // one thread's view
  public:
    Team(Progress& progress, int threads) : threads(threads), progress_(progress) {}

    const int threads;

    // One step: job(0) .. job(jobs - 1), each once, taken `grain` at a time. All threads must call it alike.
    template <class Job>
    void each(int jobs, int grain, Job job) {
        if (jobs <= 0) return;
        const uint64_t step = step_++;
        uint64_t seen = progress_.next.load(std::memory_order_acquire);
        while (seen >> 32 == step) {
            const int first = (int)(uint32_t)seen;
            if (first >= jobs) return wait(step);
            if (!progress_.next.compare_exchange_weak(seen, seen + grain, std::memory_order_acq_rel)) continue;
            const int last = first + grain < jobs ? first + grain : jobs;
            for (int i = first; i < last; i++) job(i);
            if (progress_.done.fetch_add(last - first, std::memory_order_acq_rel) + last - first == jobs) {
                progress_.done.store(0, std::memory_order_relaxed);
                progress_.next.store((step + 1) << 32, std::memory_order_release);
                return;
            }
            seen = progress_.next.load(std::memory_order_acquire);
        }
    }

  private:
    void wait(uint64_t step) {
        for (int turn = 0; progress_.next.load(std::memory_order_acquire) >> 32 == step; turn++)
            if (turn > 2000) std::this_thread::yield();  // whoever we wait for may need our core
#if defined(__x86_64__)
            else _mm_pause();
#endif
    }

    Progress& progress_;
    uint64_t step_ = 0;
};

}  // namespace paceline
