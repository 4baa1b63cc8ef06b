#include "disk_link.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "../../kernels/cpu/link.hpp"

namespace tiermoe::core {
namespace {

// As `store.format` and `store.pages` have them.
const char* const kRebuild = "rebuild it with `tiermoe prepare MODEL OUT --force`";
const char* const kPutBack = "put the file back or prepare the model again, and it is served once it verifies";

bool same(const timespec& a, const timespec& b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

std::string said(int code) { return std::generic_category().message(code); }

}  // namespace

DiskLink::DiskLink(const std::vector<File>& files, int threads) {
    try {
        for (const File& file : files) {
            auto of = std::make_unique<Opened>(Opened{file, -1, -1, false, {}});
            const std::string same_file = "/proc/self/fd/" + std::to_string(file.descriptor);  // whatever has its path now
            of->plain = open(same_file.c_str(), O_RDONLY | O_CLOEXEC);
            if (of->plain < 0 || fstat(of->plain, &of->stamp))
                throw ReadFailed(file.path + " cannot be opened (" + said(errno) + ")", kRebuild);
            of->past_cache = open(same_file.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
            of->direct = of->past_cache >= 0;
            files_.push_back(std::move(of));
        }
        std::sort(files_.begin(), files_.end(), [](const auto& a, const auto& b) { return a->file.at < b->file.at; });
        for (int i = 0; i < threads; ++i) {
            Buffer buffer(static_cast<char*>(std::aligned_alloc(kPage, kPiece + 2 * kPage)), std::free);
            if (!buffer) throw std::bad_alloc();
            threads_.emplace_back([this, held = std::move(buffer)] { run(held.get()); });
        }
    } catch (...) {
        close();
        throw;
    }
}

DiskLink::~DiskLink() { close(); }

std::size_t DiskLink::file_of(const Places::Source& source) const {
    for (std::size_t i = 0; i < files_.size(); ++i) {
        const File& file = files_[i]->file;
        if (source.at >= file.at && source.at + source.count <= file.at + file.bytes) return i;
    }
    throw std::invalid_argument("an expert is in none of the files");
}

void DiskLink::place(Places places) {
    for (const auto& source : places.sources) {
        if (source.cast) throw std::invalid_argument("experts that are read from a disk are not cast");
        if (source.at && !files_.empty()) file_of(source);
    }
    places_ = std::move(places);
}

bool DiskLink::direct() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::all_of(files_.begin(), files_.end(), [](const auto& of) { return of->direct; });
}

DiskLink::Counts DiskLink::counts() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
}

double DiskLink::now_s() { return tiermoe::now_s(); }

// Pieces end at multiples of kPiece of the file, so that none reads a page twice.
void DiskLink::cut(const std::shared_ptr<Job>& job, std::size_t file, std::int64_t offset, std::int64_t count, char* to,
                   Queue& queue) {
    while (count > 0) {
        const std::int64_t some = std::min(count, kPiece - offset % kPiece);
        queue.push_back({job, file, offset, some, to});
        ++job->left;
        offset += some, count -= some;
        if (to) to += some;
    }
}

bool DiskLink::submit(const std::vector<Copy>& copies, bool urgent) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Copy& copy : copies) {
        auto job = jobs_[copy.ticket] = std::make_shared<Job>();
        if (closed_) {
            job->stage = Stage::cancelled;
            continue;
        }
        const auto& home = places_.homes[places_.home_of[copy.segment]];
        const auto* sources = places_.sources.data() + copy.segment * places_.tensors;
        for (std::size_t i = 0; i < home.size(); ++i) {
            const std::size_t file = file_of(sources[i]);
            char* const to = home[i].base + places_.position[copy.slot] * home[i].stride;
            cut(job, file, sources[i].at - files_[file]->file.at, sources[i].count, to, urgent ? demand_ : prefetch_);
        }
        ++under_way_;
    }
    wake_.notify_all();
    return !closed_;
}

void DiskLink::promote(Ticket ticket) {
    const std::shared_ptr<Job>& job = jobs_.at(ticket);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto mine = [&](const Piece& piece) { return piece.job == job; };
    std::copy_if(prefetch_.begin(), prefetch_.end(), std::back_inserter(demand_), mine);
    prefetch_.erase(std::remove_if(prefetch_.begin(), prefetch_.end(), mine), prefetch_.end());
}

bool DiskLink::cancel(Ticket ticket) {
    const std::shared_ptr<Job>& job = jobs_.at(ticket);
    std::lock_guard<std::mutex> lock(mutex_);
    if (job->stage != Stage::queued) return job->stage == Stage::cancelled;
    for (Queue* queue : {&demand_, &prefetch_})
        queue->erase(std::remove_if(queue->begin(), queue->end(), [&](const Piece& p) { return p.job == job; }), queue->end());
    job->stage = Stage::cancelled;
    --under_way_;
    ended_.notify_all();
    return true;
}

void DiskLink::fail(Ticket ticket, std::int64_t) {
    const Job& job = *jobs_.at(ticket);
    throw ReadFailed(job.what, job.remedy);
}

Ending DiskLink::ending(Ticket ticket) {
    switch (jobs_.at(ticket)->stage.load(std::memory_order_acquire)) {
        case Stage::done: return Ending::copied;
        case Stage::failed: return Ending::failed;
        case Stage::cancelled: return Ending::cancelled;
        default: return Ending::under_way;
    }
}

void DiskLink::wait(const Job& job) {
    if (over(job)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [&] { return over(job); });
}

bool DiskLink::times(Ticket ticket, Times& found) {
    const Job& job = *jobs_.at(ticket);
    std::lock_guard<std::mutex> lock(mutex_);
    found = {job.start_s, job.end_s, job.link_s, 0.0};
    return true;
}

std::int64_t DiskLink::pending() {
    std::lock_guard<std::mutex> lock(mutex_);
    return under_way_;
}

void DiskLink::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        for (Queue* queue : {&demand_, &prefetch_}) {
            for (const Piece& piece : *queue) {
                if (over(*piece.job)) continue;
                piece.job->stage = Stage::cancelled;  // also of one that has begun: nobody reads what is in its slot
                --under_way_;
            }
            queue->clear();
        }
    }
    wake_.notify_all();
    ended_.notify_all();
    for (auto& thread : threads_)
        if (thread.joinable()) thread.join();
    for (const auto& of : files_)
        for (int* descriptor : {&of->plain, &of->past_cache})
            if (*descriptor >= 0) ::close(*descriptor), *descriptor = -1;
}

double DiskLink::measure(std::int64_t bytes) {
    std::int64_t all = 0;
    for (const auto& of : files_) all += of->file.bytes;
    const std::int64_t apart = std::max(kPiece, all / std::max<std::int64_t>(1, bytes / kPiece));
    const auto job = std::make_shared<Job>();
    std::int64_t sum = 0;
    const double start_s = now_s();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (std::size_t i = 0; i < files_.size(); ++i)
            for (std::int64_t at = 0; at < files_[i]->file.bytes; at += apart) {
                const std::int64_t begin = at / kPiece * kPiece, count = std::min(kPiece, files_[i]->file.bytes - begin);
                cut(job, i, begin, count, nullptr, demand_);
                sum += count;
            }
        ++under_way_;
    }
    wake_.notify_all();
    wait(*job);
    if (job->stage == Stage::failed) throw ReadFailed(job->what, job->remedy);
    return static_cast<double>(sum) / std::max(1e-9, now_s() - start_s);
}

void DiskLink::run(char* buffer) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        wake_.wait(lock, [this] { return closed_ || !demand_.empty() || !prefetch_.empty(); });
        if (closed_) return;
        Queue& queue = demand_.empty() ? prefetch_ : demand_;
        const Piece piece = queue.front();
        queue.pop_front();
        Job& job = *piece.job;
        const double start_s = now_s();
        if (job.stage == Stage::queued) job.stage = Stage::started, job.start_s = start_s;
        if (job.what.empty()) read(piece, buffer, lock);  // else another piece of it has failed
        if (piece.to) {
            ++counts_.pieces;
            counts_.longest_s = std::max(counts_.longest_s, now_s() - start_s);
        }
        if (!--job.left && !over(job)) end(job);
    }
}

// Copies overlap: each takes the link from where the one before it ended.
void DiskLink::end(Job& job) {
    job.end_s = now_s();
    job.link_s = job.end_s - std::max(job.start_s, free_s_);
    free_s_ = job.end_s;
    --under_way_;
    job.stage.store(job.what.empty() ? Stage::done : Stage::failed, std::memory_order_release);
    ended_.notify_all();
}

// Called with the lock, which it gives up while it reads.
void DiskLink::read(const Piece& piece, char* buffer, std::unique_lock<std::mutex>& lock) {
    Opened& of = *files_[piece.file];
    Job& job = *piece.job;
    bool direct = of.direct;
    lock.unlock();
    const std::int64_t begin = piece.offset / kPage * kPage, needed = piece.offset + piece.count - begin;
    const std::int64_t most = (needed + kPage - 1) / kPage * kPage;  // of which there may be less at the file's end
    std::int64_t got = 0;
    int code = 0;
    while (got < needed) {
        const std::int64_t at = got / kPage * kPage;  // a direct read begins on a page
        const auto size = static_cast<std::size_t>(most - at);
        const ssize_t some = pread(direct ? of.past_cache : of.plain, buffer + at, size, begin + at);
        if (some < 0 && errno == EINTR) continue;
        if (some < 0 && errno == EINVAL && direct) {  // some file systems open files so, and do not read them
            direct = false;
            continue;
        }
        if (some < 0) code = errno;
        if (some < 0 || at + some <= got) break;
        got = at + some;
    }
    if (!direct) posix_fadvise(of.plain, begin, most, POSIX_FADV_DONTNEED);
    if (piece.to && got >= needed)
        std::memcpy(piece.to, buffer + (piece.offset - begin), static_cast<std::size_t>(piece.count));
    lock.lock();
    of.direct = of.direct && direct;
    if (piece.to) counts_.read += got;
    job.remedy = kRebuild;
    if (code) {
        job.what = of.file.path + " cannot be read (" + said(code) + ")";
    } else if (got < needed) {
        job.what = of.file.path + " ends at byte " + std::to_string(begin + got) + ", within an expert";
    } else if (std::string what = change(of); !what.empty()) {
        job.what = std::move(what), job.remedy = kPutBack;
    }
}

// What happened to a file's content, as `store.pages` tells it; empty: nothing. One that was removed or replaced is
// read as it was.
std::string DiskLink::change(Opened& of) {
    struct stat now;
    if (fstat(of.plain, &now)) return of.file.path + " cannot be looked at while it is served (" + said(errno) + ")";
    const struct stat& was = of.stamp;
    const bool kept = was.st_nlink == now.st_nlink && was.st_mode == now.st_mode && was.st_uid == now.st_uid;
    if (was.st_size != now.st_size || !same(was.st_mtim, now.st_mtim) || (kept && !same(was.st_ctim, now.st_ctim)))
        return of.file.path + " changed while it was served";
    of.stamp = now;  // a link, mode or owner that changed leaves the content
    return {};
}

}  // namespace tiermoe::core
