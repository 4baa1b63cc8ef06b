// Reads experts from files past the page cache: the link of slots in host memory, for a store that is larger than it.
//
// A copy is read in pieces of at most kPiece bytes, by threads of the link's own. Pieces of demand come before those of
// prefetches, also of such as have begun; copies of one kind are read in the order in which they were asked for. A piece
// goes through a buffer of its thread, since direct reads want file offsets and memory on pages, where experts do not lie.
// A file system without direct reads is read through the page cache, of which the pieces are dropped again.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core.hpp"
#include "places.hpp"

namespace tiermoe::core {

// A file cannot be read, or has changed. what, and the remedy, as of Python's `StoreError`.
struct ReadFailed : std::runtime_error {
    ReadFailed(const std::string& what, std::string remedy) : std::runtime_error(what), remedy(std::move(remedy)) {}
    std::string remedy;
};

class DiskLink : public Link {
  public:
    static constexpr std::int64_t kPiece = 2 << 20, kPage = 4096;

    // A file that is mapped from `at` on: its experts are named by their addresses there, which nobody reads.
    // descriptor: of the open file; the link opens it again.
    struct File {
        std::string path;
        int descriptor;
        const char* at;
        std::int64_t bytes;
    };

    // Throws ReadFailed: a file cannot be opened; std::system_error: a thread cannot be started.
    DiskLink(const std::vector<File>& files, int threads);
    ~DiskLink() override;
    DiskLink(const DiskLink&) = delete;
    DiskLink& operator=(const DiskLink&) = delete;

    // Before the first copy, and whenever none is under way. Throws std::invalid_argument: a source is in no file, or its
    // numbers are to be cast.
    void place(Places places);

    // Whether all files are read directly, as far as known.
    bool direct() const;
    // Bytes per second of pieces at equal distances in all files, `bytes` in all, read side by side; no copy is under way.
    double measure(std::int64_t bytes);

    // Of all copies. read: bytes of files, with what lies beside experts on their pages.
    struct Counts {
        std::int64_t read = 0, pieces = 0;
        double longest_s = 0.0;  // of a piece
    };
    Counts counts() const;

    bool submit(const std::vector<Copy>& copies, bool urgent) override;
    void promote(Ticket ticket) override;
    bool cancel(Ticket ticket) override;
    [[noreturn]] void fail(Ticket ticket, std::int64_t layer) override;
    Ending ending(Ticket ticket) override;
    bool join(Ticket ticket, std::int64_t) override { return wait(ticket), true; }
    bool overtake(Ticket ticket) override { return wait(ticket), true; }
    void wait(Ticket ticket) override { wait(*jobs_.at(ticket)); }
    bool times(Ticket ticket, Times& found) override;
    double now_s() override;
    void forget(Ticket ticket) override { jobs_.erase(ticket); }
    std::int64_t pending() override;
    void close() override;

  private:
    struct Opened {
        File file;
        int plain, past_cache;  // descriptors
        bool direct;
        struct stat stamp;  // when it was opened, or after the last change that left its content
    };
    enum class Stage : int { queued, started, done, failed, cancelled };
    struct Job {
        std::int64_t left = 0;  // pieces
        std::atomic<Stage> stage{Stage::queued};
        double start_s = 0.0, end_s = 0.0, link_s = 0.0;
        std::string what, remedy;  // of a failure
    };
    struct Piece {
        std::shared_ptr<Job> job;
        std::size_t file;
        std::int64_t offset, count;
        char* to;  // null: it is only measured
    };
    using Queue = std::deque<Piece>;
    using Buffer = std::unique_ptr<char, void (*)(void*)>;

    void cut(const std::shared_ptr<Job>& job, std::size_t file, std::int64_t offset, std::int64_t count, char* to, Queue& queue);
    std::size_t file_of(const Places::Source& source) const;
    void wait(const Job& job);
    void run(char* buffer);
    void read(const Piece& piece, char* buffer, std::unique_lock<std::mutex>& lock);
    std::string change(Opened& of);
    void end(Job& job);
    static bool over(const Job& job) { return job.stage.load(std::memory_order_acquire) >= Stage::done; }

    std::vector<std::unique_ptr<Opened>> files_;  // by address
    Places places_;
    std::unordered_map<Ticket, std::shared_ptr<Job>> jobs_;  // of the forward's thread
    mutable std::mutex mutex_;                               // of all that follows, of jobs and of stamps
    std::condition_variable wake_, ended_;
    Queue demand_, prefetch_;
    std::int64_t under_way_ = 0;  // jobs
    bool closed_ = false;
    double free_s_ = 0.0;  // when the last copy ended
    Counts counts_;
    std::vector<std::thread> threads_;
};

}  // namespace tiermoe::core
