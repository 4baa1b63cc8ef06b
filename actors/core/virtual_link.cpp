#include "virtual_link.hpp"

#include <algorithm>

namespace tiermoe::core {

double VirtualLink::seconds(std::int64_t bytes) {
    const auto found = known_s_.find(bytes);
    if (found != known_s_.end()) return found->second;
    return known_s_[bytes] = copy_s_(bytes);
}

bool VirtualLink::submit(const std::vector<Copy>& copies, bool urgent) {
    catch_up();
    for (const Copy& copy : copies) {
        jobs_[copy.ticket] = {clock_.now_s, copy, closed_ ? Ending::cancelled : Ending::under_way};
        if (closed_) continue;
        (urgent ? demand_ : prefetch_).push_back(copy.ticket);
        submitted_bytes_ += copy.bytes;
    }
    if (closed_) return false;
    if (!current_ && !copies.empty()) {
        start();
        catch_up();
    }
    return true;
}

bool VirtualLink::leave(Ticket ticket) {
    for (auto* queue : {&demand_, &prefetch_}) {
        const auto found = std::find(queue->begin(), queue->end(), ticket);
        if (found == queue->end()) continue;
        queue->erase(found);
        return true;
    }
    return false;
}

void VirtualLink::promote(Ticket ticket) {
    catch_up();
    if (leave(ticket)) demand_.push_back(ticket);
}

bool VirtualLink::cancel(Ticket ticket) {
    catch_up();
    if (!leave(ticket)) return false;
    jobs_[ticket].ending = Ending::cancelled;
    return true;
}

Ending VirtualLink::ending(Ticket ticket) {
    catch_up();
    return jobs_.at(ticket).ending;
}

void VirtualLink::wait(Ticket ticket) {
    catch_up();
    const double begin_s = clock_.now_s;
    while (jobs_.at(ticket).ending == Ending::under_way) {
        if (!current_) throw Broken("waiting for a copy that is not queued");
        clock_.now_s = end_s_;
        catch_up();
    }
    if (late_s_ && clock_.now_s > begin_s) {
        clock_.now_s += late_s_;
        catch_up();
    }
}

bool VirtualLink::times(Ticket ticket, Times& found) {
    found = jobs_.at(ticket).times;
    return true;
}

double VirtualLink::busy_until() {
    catch_up();
    return current_ ? end_s_ : -1.0;
}

double VirtualLink::busy_s() {
    catch_up();
    return copied_s_ + (current_ ? std::max(0.0, clock_.now_s - start_s_) : 0.0);
}

void VirtualLink::compute(double seconds, double share) {
    if (share < 1)
        while (seconds > 0) {
            const double end_s = busy_until();
            if (end_s < 0) break;
            const double whole_s = seconds / share, left_s = end_s - clock_.now_s;
            const double beside_s = std::min(whole_s, left_s);
            clock_.now_s = beside_s < whole_s ? end_s : clock_.now_s + beside_s;
            seconds -= beside_s * share;
        }
    if (seconds > 0) clock_.now_s += seconds;
}

void VirtualLink::catch_up() {
    while (current_ && end_s_ <= clock_.now_s) {
        Job& job = jobs_[current_];
        const double took_s = end_s_ - start_s_;
        job.ending = carry(job.copy) ? Ending::copied : Ending::failed;
        job.times = {start_s_, end_s_, took_s, job.copy.back ? took_s / 2 : 0.0};
        current_ = 0;
        free_s_ = end_s_;
        copied_s_ += took_s;
        if (!demand_.empty() || !prefetch_.empty()) start();
    }
}

void VirtualLink::start() {
    auto& queue = demand_.empty() ? prefetch_ : demand_;
    current_ = queue.front();
    queue.pop_front();
    const Job& job = jobs_[current_];
    start_s_ = std::max(free_s_, job.submitted_s);
    const double copy_s = seconds(job.copy.bytes);
    end_s_ = start_s_ + (job.copy.back ? 2 * copy_s : copy_s);
}

void VirtualLink::close() {
    closed_ = true;
    for (auto* queue : {&demand_, &prefetch_}) {
        for (Ticket ticket : *queue) jobs_[ticket].ending = Ending::cancelled;
        queue->clear();
    }
}

}  // namespace tiermoe::core
