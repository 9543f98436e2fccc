// hetero.io._uring: one thread that owns an io_uring and keeps `num_lanes` blocks in flight, lowest (priority, id) first.
//
// Raw system calls and the kernel's own header only. The thread never needs the GIL: Python pushes blocks into a queue
// under a mutex, and collects completions from another after its eventfd becomes readable.
//
// Note [ownership]
// State is shared by the Ring object and the thread. join() releases the descriptors and the rings; a thread that is left
// behind with a stuck block keeps them for as long as it needs, and releases them itself when it can end.
// A forked child has the memory but not the thread: there, everything of State is leaked on purpose, because a mutex or
// a condition may have been copied in a locked state.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "rings.hpp"

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace nb = nanobind;

namespace {

constexpr uint64_t kWakeTag = ~0ULL;
constexpr uint64_t kPage = 4096;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

int64_t clock_ns(clockid_t clock) {
    timespec t;
    return clock_gettime(clock, &t) == 0 ? int64_t(t.tv_sec) * 1000000000 + t.tv_nsec : 0;
}

// hetero.io.backends.base.Block, field by field
using BlockTuple = std::tuple<int64_t, int64_t, int64_t, int, uint64_t, uint64_t, uint64_t, bool, bool, uint64_t, uint64_t>;
// hetero.io.backends.base.Completion, field by field
using CompletionTuple = std::tuple<int64_t, int, uint64_t, uint64_t, int64_t, int64_t>;

struct Block {
    int64_t id, request_id;
    int fd;
    uint64_t offset, nbytes, address;
    bool write, aligned;
    uint64_t copy_skip, copy_nbytes;
};

struct Lane {
    bool active = false;
    Block block{};
    uint64_t done = 0;
    int64_t start_ns = 0, progress_ns = 0;
    uint8_t* slot = nullptr;

    uint8_t* memory() const { return block.copy_nbytes ? slot : reinterpret_cast<uint8_t*>(block.address); }
};

struct State {
    // Guards everything below except `rings` and what a running lane's kernel request points to.
    std::mutex mutex;
    std::condition_variable changed;  // signalled when `ready` or `exited` is set
    std::map<std::pair<int64_t, int64_t>, Block> waiting;  // (priority, id) -> block, lowest first
    std::unordered_map<int64_t, size_t> num_left;  // request id -> blocks waiting or in flight
    std::vector<Lane> lanes;
    std::vector<CompletionTuple> finished;
    bool ready = false, exited = false, stopping = false, abandoned = false;
    int setup_error = 0;
    int64_t final_cpu_ns = 0;
    int wake_fd = -1;  // Python -> thread: there is something new to start, or stop
    int done_fd = -1;  // thread -> Python: `finished` holds a request's last block, or an error
    Rings rings;

    ~State() { release(); }

    // True when these were the last blocks of their request.
    bool count_down(int64_t request_id, size_t num_blocks) {
        const auto found = num_left.find(request_id);
        if (found == num_left.end() || (found->second -= num_blocks) > 0) return false;
        num_left.erase(found);
        return true;
    }

    void release() {
        rings.release();
        if (wake_fd >= 0) close(wake_fd);
        if (done_fd >= 0) close(done_fd);
        wake_fd = done_fd = -1;
    }
};

void signal_fd(int fd) {
    const uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void drain_fd(int fd) {
    uint64_t count;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

// The thread's work. `queue_*` and `finish` run with the mutex held.
class Worker {
  public:
    explicit Worker(State& state) : s_(state) {}

    void run() {
        const int error = s_.rings.setup(unsigned(s_.lanes.size()) + 1);
        {
            std::lock_guard<std::mutex> lock(s_.mutex);
            s_.setup_error = error;
            s_.ready = true;
        }
        s_.changed.notify_all();
        if (error) return;
        queue_wake_poll();
        for (;;) {
            {
                std::lock_guard<std::mutex> lock(s_.mutex);
                start_waiting();
                if (s_.stopping && num_active_ == 0) return;
            }
            const int failed = s_.rings.submit_and_wait();
            if (failed == EAGAIN) usleep(1000);  // the kernel is short of memory: nothing was lost, ask again
            reap();
        }
    }

  private:
    void start_waiting() {
        for (size_t i = 0; i < s_.lanes.size() && !s_.waiting.empty(); i++) {
            Lane& lane = s_.lanes[i];
            if (lane.active) continue;
            lane.block = s_.waiting.begin()->second;
            s_.waiting.erase(s_.waiting.begin());
            lane.active = true;
            lane.done = 0;
            lane.start_ns = lane.progress_ns = now_ns();
            num_active_++;
            if (lane.block.write && lane.block.copy_nbytes)
                memcpy(lane.slot, reinterpret_cast<void*>(lane.block.address), lane.block.copy_nbytes);
            queue_transfer(i, false);
        }
    }

    void queue_transfer(size_t index, bool punt) {
        const Lane& lane = s_.lanes[index];
        io_uring_sqe sqe{};
        sqe.opcode = lane.block.write ? IORING_OP_WRITE : IORING_OP_READ;
        sqe.flags = punt ? IOSQE_ASYNC : 0;
        sqe.fd = lane.block.fd;
        sqe.off = lane.block.offset + lane.done;
        sqe.addr = reinterpret_cast<uint64_t>(lane.memory() + lane.done);
        sqe.len = uint32_t(lane.block.nbytes - lane.done);
        sqe.user_data = index;
        s_.rings.queue(sqe);
    }

    void queue_wake_poll() {
        io_uring_sqe sqe{};
        sqe.opcode = IORING_OP_POLL_ADD;
        sqe.fd = s_.wake_fd;
        sqe.poll32_events = POLLIN;
        sqe.user_data = kWakeTag;
        s_.rings.queue(sqe);
    }

    void reap() {
        bool news = false;
        io_uring_cqe cqe;
        std::lock_guard<std::mutex> lock(s_.mutex);
        while (s_.rings.pop(&cqe)) {
            if (cqe.user_data == kWakeTag) {
                drain_fd(s_.wake_fd);
                queue_wake_poll();
            } else {
                news |= advance(size_t(cqe.user_data), cqe.res);
            }
        }
        if (news) signal_fd(s_.done_fd);
    }

    // Takes in one kernel result; asks for the rest of a partial transfer. True when Python should hear of it now.
    bool advance(size_t index, int result) {
        Lane& lane = s_.lanes[index];
        if (result == -EINTR || result == -EAGAIN) {
            if (s_.abandoned) return finish(lane, EINTR);
            queue_transfer(index, true);
            return false;
        }
        if (result < 0) return finish(lane, -result);
        if (result == 0) return finish(lane, lane.block.write ? EIO : 0);
        lane.done += uint64_t(result);
        lane.progress_ns = now_ns();
        const bool ended = lane.done == lane.block.nbytes || (lane.block.aligned && lane.done % kPage != 0);
        if (ended || s_.abandoned) return finish(lane, 0);
        queue_transfer(index, false);
        return false;
    }

    bool finish(Lane& lane, int error) {
        const Block& b = lane.block;
        uint64_t useful = lane.done;
        if (b.copy_nbytes) {
            useful = lane.done > b.copy_skip ? lane.done - b.copy_skip : 0;
            if (useful > b.copy_nbytes) useful = b.copy_nbytes;
            if (!b.write && !error) memcpy(reinterpret_cast<void*>(b.address), lane.slot + b.copy_skip, useful);
        }
        s_.finished.emplace_back(b.id, error, useful, lane.done, lane.start_ns, now_ns());
        lane.active = false;
        num_active_--;
        return s_.count_down(b.request_id, 1) || error;
    }

    State& s_;
    size_t num_active_ = 0;
};

void* thread_main(void* argument) {
    std::unique_ptr<std::shared_ptr<State>> holder(static_cast<std::shared_ptr<State>*>(argument));
    State& state = **holder;
    pthread_setname_np(pthread_self(), "hetero-io-ring");
    Worker(state).run();
    {
        std::lock_guard<std::mutex> lock(state.mutex);
        state.final_cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        state.exited = true;
        if (state.abandoned) state.release();
    }
    state.changed.notify_all();
    return nullptr;
}

[[noreturn]] void raise_os_error(int error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

class Ring {
  public:
    Ring(unsigned num_lanes, uint64_t bounce_address, uint64_t slot_nbytes)
        : owner_pid_(getpid()), state_(std::make_shared<State>()) {
        state_->lanes.resize(num_lanes);
        for (unsigned i = 0; i < num_lanes; i++)
            state_->lanes[i].slot = reinterpret_cast<uint8_t*>(bounce_address + i * slot_nbytes);
        state_->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        state_->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (state_->wake_fd < 0 || state_->done_fd < 0) raise_os_error(errno);
        start_thread();
        std::unique_lock<std::mutex> lock(state_->mutex);
        state_->changed.wait(lock, [&] { return state_->ready; });
        const int error = state_->setup_error;
        lock.unlock();
        if (error) {
            pthread_join(thread_, nullptr);
            joined_ = true;
            raise_os_error(error);
        }
    }

    ~Ring() {
        if (getpid() != owner_pid_) {
            new std::shared_ptr<State>(state_);  // see Note [ownership]
        } else if (!joined_) {
            stop();
            leave_behind();
        }
    }

    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    int done_fd() const { return state_->done_fd; }

    void push(const std::vector<BlockTuple>& blocks) {
        bool idle_lane = false;
        {
            std::lock_guard<std::mutex> lock(state_->mutex);
            for (const auto& [id, request_id, priority, fd, offset, nbytes, address, write, aligned, skip, copy] : blocks) {
                state_->waiting.emplace(std::make_pair(priority, id),
                                        Block{id, request_id, fd, offset, nbytes, address, write, aligned, skip, copy});
                state_->num_left[request_id]++;
            }
            for (const Lane& lane : state_->lanes) idle_lane |= !lane.active;
        }
        if (idle_lane) signal_fd(state_->wake_fd);  // otherwise the thread looks here after its next completion
    }

    std::vector<int64_t> withdraw(int64_t priority, int64_t first_id, int64_t last_id, bool unless_started) {
        std::vector<int64_t> ids;
        std::lock_guard<std::mutex> lock(state_->mutex);
        const auto first = state_->waiting.lower_bound({priority, first_id});
        const auto last = state_->waiting.upper_bound({priority, last_id});
        for (auto it = first; it != last; ++it) ids.push_back(it->first.second);
        if (unless_started && int64_t(ids.size()) != last_id - first_id + 1) return {};
        // what is left of the request may already be in `finished`, and did not count as news then
        if (first != last && state_->count_down(first->second.request_id, ids.size())) signal_fd(state_->done_fd);
        state_->waiting.erase(first, last);
        return ids;
    }

    std::vector<CompletionTuple> take() {
        std::vector<CompletionTuple> out;
        std::lock_guard<std::mutex> lock(state_->mutex);
        out.swap(state_->finished);
        return out;
    }

    std::vector<std::tuple<int64_t, int64_t>> in_flight() {
        std::vector<std::tuple<int64_t, int64_t>> out;
        const int64_t now = now_ns();
        std::lock_guard<std::mutex> lock(state_->mutex);
        for (const Lane& lane : state_->lanes)
            if (lane.active) out.emplace_back(lane.block.id, now - lane.progress_ns);
        return out;
    }

    int64_t cpu_ns() {
        std::lock_guard<std::mutex> lock(state_->mutex);
        clockid_t clock;
        if (state_->exited || pthread_getcpuclockid(thread_, &clock) != 0) return state_->final_cpu_ns;
        return clock_ns(clock);
    }

    // Asks the thread to end once nothing is in flight.
    void stop() {
        {
            std::lock_guard<std::mutex> lock(state_->mutex);
            state_->stopping = true;
        }
        signal_fd(state_->wake_fd);
    }

    // Waits up to timeout_s for the thread to end. Releases the GIL.
    bool join(double timeout_s) {
        if (joined_) return true;
        {
            std::unique_lock<std::mutex> lock(state_->mutex);
            const auto timeout = std::chrono::duration<double>(timeout_s);
            if (!state_->changed.wait_for(lock, timeout, [&] { return state_->exited; })) return false;
        }
        pthread_join(thread_, nullptr);
        state_->release();
        return joined_ = true;
    }

    // Gives up on a stopped thread that a stuck block keeps: it starts no more I/O and frees itself if it ever can.
    void leave_behind() {
        if (joined_) return;
        {
            std::lock_guard<std::mutex> lock(state_->mutex);
            state_->abandoned = true;
            state_->waiting.clear();
            if (state_->exited) state_->release();
        }
        pthread_detach(thread_);
        joined_ = true;
    }

  private:
    void start_thread() {
        // Signals belong to Python's main thread.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        auto holder = std::make_unique<std::shared_ptr<State>>(state_);
        const int error = pthread_create(&thread_, nullptr, thread_main, holder.get());
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error) raise_os_error(error);
        holder.release();
    }

    pid_t owner_pid_;
    std::shared_ptr<State> state_;
    pthread_t thread_{};
    bool joined_ = false;
};

}  // namespace

NB_MODULE(_uring, m) {
    nb::set_leak_warnings(false);  // an engine that lives until the interpreter ends is no leak
    nb::class_<Ring>(m, "Ring")
        .def(nb::init<unsigned, uint64_t, uint64_t>(), nb::arg("num_lanes"), nb::arg("bounce_address"),
             nb::arg("slot_nbytes"))
        .def_prop_ro("done_fd", &Ring::done_fd)
        .def("push", &Ring::push, nb::arg("blocks"))
        .def("withdraw", &Ring::withdraw, nb::arg("priority"), nb::arg("first_id"), nb::arg("last_id"),
             nb::arg("unless_started"))
        .def("take", &Ring::take)
        .def("in_flight", &Ring::in_flight)
        .def("cpu_ns", &Ring::cpu_ns)
        .def("stop", &Ring::stop)
        .def("join", &Ring::join, nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
        .def("leave_behind", &Ring::leave_behind);
}
