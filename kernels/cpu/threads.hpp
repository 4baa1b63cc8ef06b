// A small pool of threads for one worker's kernels: fixed size, bound to cores if they are named.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tiermoe {

// Between two looks at what another thread will change.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Threads {
   public:
    // `count` threads work on a call: the caller and count - 1 that wait here. `cores` is empty, or names a core for
    // each of them; the caller is bound to the first one for the time of a call only. Throws std::system_error when
    // a thread cannot be started or bound.
    Threads(int count, std::vector<int> cores);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return count_; }

    // work(job, thread) for every job below `jobs`, each once, in no fixed order; returns when all are done.
    // One call at a time: the caller holds `busy()`.
    void run(std::int64_t jobs, const std::function<void(std::int64_t, int)>& work);

    std::mutex& busy() { return busy_; }

    // At least `bytes` of memory, aligned to 64, that stays until the next call. Contents are undefined.
    void* scratch(std::size_t bytes);

    // Binds the calling thread to the first core while it lives.
    class Bound {
       public:
        explicit Bound(const Threads& threads);
        ~Bound();

       private:
        bool bound_ = false;
        std::vector<unsigned char> before_;
    };

   private:
    void loop(int thread);
    void work_off(int thread);
    void stop();

    const int count_;
    const std::vector<int> cores_;
    std::mutex busy_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::vector<unsigned char> scratch_;
    const std::function<void(std::int64_t, int)>* work_ = nullptr;
    std::int64_t jobs_ = 0;
    std::atomic<std::int64_t> next_{0};
    std::atomic<std::uint64_t> call_{0};
    std::atomic<int> working_{0};
    std::atomic<bool> stop_{false};
};

}  // namespace tiermoe
