// The submission and completion rings of one io_uring, on raw system calls and the kernel's own header.

#pragma once

#include <linux/io_uring.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

// The two rings shared with the kernel. Used by the owning thread only.
class Rings {
  public:
    Rings() = default;
    Rings(const Rings&) = delete;
    Rings& operator=(const Rings&) = delete;
    ~Rings() { release(); }

    // Returns 0 or an errno.
    int setup(unsigned entries) {
        const unsigned attempts[] = {IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
                                     IORING_SETUP_CLAMP, 0};  // newest kernel first; older ones refuse unknown flags
        for (unsigned flags : attempts) {
            params_ = {};
            params_.flags = flags;
            fd_ = int(syscall(__NR_io_uring_setup, entries, &params_));
            if (fd_ >= 0 || errno != EINVAL) break;
        }
        if (fd_ < 0) return errno;
        if (!supports_read_write()) return ENOSYS;
        sq_nbytes_ = params_.sq_off.array + params_.sq_entries * sizeof(unsigned);
        cq_nbytes_ = params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe);
        sqe_nbytes_ = params_.sq_entries * sizeof(io_uring_sqe);
        sq_ = map(sq_nbytes_, IORING_OFF_SQ_RING);
        cq_ = map(cq_nbytes_, IORING_OFF_CQ_RING);
        sqes_ = map(sqe_nbytes_, IORING_OFF_SQES);
        return sq_ && cq_ && sqes_ ? 0 : errno;
    }

    void release() {
        if (sqes_) munmap(sqes_, sqe_nbytes_);
        if (cq_) munmap(cq_, cq_nbytes_);
        if (sq_) munmap(sq_, sq_nbytes_);
        if (fd_ >= 0) close(fd_);
        sqes_ = cq_ = sq_ = nullptr;
        fd_ = -1;
    }

    // The caller keeps fewer operations outstanding than the ring has entries, so there is always a free one.
    void queue(const io_uring_sqe& sqe) {
        unsigned* tail = at<unsigned>(sq_, params_.sq_off.tail);
        const unsigned index = *tail & *at<unsigned>(sq_, params_.sq_off.ring_mask);
        static_cast<io_uring_sqe*>(sqes_)[index] = sqe;
        at<unsigned>(sq_, params_.sq_off.array)[index] = index;
        __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
        num_queued_++;
    }

    // Hands queued entries to the kernel and waits for at least one completion.
    int submit_and_wait() {
        const long n = syscall(__NR_io_uring_enter, fd_, num_queued_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (n < 0) return errno;
        num_queued_ -= unsigned(n);
        return 0;
    }

    bool pop(io_uring_cqe* out) {
        unsigned* head = at<unsigned>(cq_, params_.cq_off.head);
        if (*head == __atomic_load_n(at<unsigned>(cq_, params_.cq_off.tail), __ATOMIC_ACQUIRE)) return false;
        *out = at<io_uring_cqe>(cq_, params_.cq_off.cqes)[*head & *at<unsigned>(cq_, params_.cq_off.ring_mask)];
        __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
        return true;
    }

  private:
    template <typename T> static T* at(void* base, unsigned offset) {
        return reinterpret_cast<T*>(static_cast<uint8_t*>(base) + offset);
    }

    void* map(size_t nbytes, off_t offset) {
        void* p = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
        return p == MAP_FAILED ? nullptr : p;
    }

    bool supports_read_write() {
        constexpr unsigned num_ops = 64;
        std::vector<uint8_t> memory(sizeof(io_uring_probe) + num_ops * sizeof(io_uring_probe_op));
        auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
        if (syscall(__NR_io_uring_register, fd_, IORING_REGISTER_PROBE, probe, num_ops) < 0) return false;
        for (unsigned op : {unsigned(IORING_OP_READ), unsigned(IORING_OP_WRITE), unsigned(IORING_OP_POLL_ADD)})
            if (op > probe->last_op || !(probe->ops[op].flags & IO_URING_OP_SUPPORTED)) return false;
        return true;
    }

    int fd_ = -1;
    io_uring_params params_{};
    void *sq_ = nullptr, *cq_ = nullptr, *sqes_ = nullptr;
    size_t sq_nbytes_ = 0, cq_nbytes_ = 0, sqe_nbytes_ = 0;
    unsigned num_queued_ = 0;
};
