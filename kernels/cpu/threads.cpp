#include "threads.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace tiermoe {
namespace {

constexpr int kSpins = 2000;  // some tens of microseconds, about what waking a thread costs

void bind(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (sched_setaffinity(0, sizeof(set), &set) != 0)
        throw std::system_error(errno, std::generic_category(), "binding a thread to its core");
}

}  // namespace

Threads::Threads(int count, std::vector<int> cores) : count_(count), cores_(std::move(cores)) {
    std::atomic<int> failed{0};
    std::atomic<int> started{0};
    try {
        for (int thread = 1; thread < count_; ++thread)
            workers_.emplace_back([this, thread, &failed, &started] {
                try {
                    if (!cores_.empty()) bind(cores_[static_cast<std::size_t>(thread)]);
                } catch (const std::system_error& error) {
                    failed = error.code().value();
                }
                ++started;
                loop(thread);
            });
        while (started < count_ - 1) std::this_thread::yield();
        if (!cores_.empty()) Bound check(*this);
        if (failed) throw std::system_error(failed, std::generic_category(), "binding a thread to its core");
    } catch (...) {
        while (started < static_cast<int>(workers_.size())) std::this_thread::yield();
        stop();
        throw;
    }
}

Threads::~Threads() { stop(); }

void Threads::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        ++call_;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Threads::work_off(int thread) {
    for (std::int64_t job = next_++; job < jobs_; job = next_++) (*work_)(job, thread);
}

void Threads::run(std::int64_t jobs, const std::function<void(std::int64_t, int)>& work) {
    if (workers_.empty() || jobs < 2) {
        for (std::int64_t job = 0; job < jobs; ++job) work(job, 0);
        return;
    }
    work_ = &work;
    jobs_ = jobs;
    next_ = 0;
    working_ = static_cast<int>(workers_.size());
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ++call_;
    }
    wake_.notify_all();
    work_off(0);
    for (int spins = 0; working_ > 0; ++spins) {
        relax();
        if (spins > kSpins) std::this_thread::yield();
    }
}

void Threads::loop(int thread) {
    for (std::uint64_t seen = 0;;) {
        for (int spins = 0; call_ == seen && spins < kSpins; ++spins) relax();
        if (call_ == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return call_ != seen; });
        }
        ++seen;  // one call at a time: the next begins only after this worker has finished the present one
        if (stop_) return;
        work_off(thread);
        --working_;
    }
}

void* Threads::scratch(std::size_t bytes) {
    constexpr std::size_t kAlign = 64;
    if (scratch_.size() < bytes + kAlign) {
        scratch_.clear();
        scratch_.shrink_to_fit();
        scratch_.resize(bytes + kAlign);
    }
    const auto at = reinterpret_cast<std::uintptr_t>(scratch_.data());
    return scratch_.data() + (kAlign - at % kAlign) % kAlign;
}

Threads::Bound::Bound(const Threads& threads) {
    if (threads.cores_.empty()) return;
    cpu_set_t before;
    if (sched_getaffinity(0, sizeof(before), &before) != 0)
        throw std::system_error(errno, std::generic_category(), "reading a thread's cores");
    bind(threads.cores_.front());
    before_.resize(sizeof(before));
    std::memcpy(before_.data(), &before, sizeof(before));
    bound_ = true;
}

Threads::Bound::~Bound() {
    if (!bound_) return;
    cpu_set_t before;
    std::memcpy(&before, before_.data(), sizeof(before));
    sched_setaffinity(0, sizeof(before), &before);
}

}  // namespace tiermoe
