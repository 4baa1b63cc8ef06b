// The calls of a GPU's driver that a link makes, by address: those of libcuda, or of what stands in for it in a test. The
// core links with neither CUDA nor torch.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core.hpp"

namespace tiermoe::core {

// Each call returns 0, or a code that `describe` knows. The names in comments are libcuda's.
struct Driver {
    using Handle = void*;  // of a context, stream or event
    static constexpr int kNotReady = 600;           // CUDA_ERROR_NOT_READY, of `query`
    static constexpr unsigned kTimed = 0, kUntimed = 2;  // CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING

    Handle context;
    int (*enter)(Handle context);                                                               // cuCtxSetCurrent
    int (*up)(std::uint64_t to, const void* from, std::size_t bytes, Handle stream);            // cuMemcpyHtoDAsync_v2
    int (*down)(void* to, std::uint64_t from, std::size_t bytes, Handle stream);                // cuMemcpyDtoHAsync_v2
    int (*create)(Handle* event, unsigned flags);                                               // cuEventCreate
    int (*destroy)(Handle event);                                                               // cuEventDestroy_v2
    int (*record)(Handle event, Handle stream);                                                 // cuEventRecord
    int (*wait)(Handle stream, Handle event, unsigned flags);                                   // cuStreamWaitEvent
    int (*query)(Handle event);                                                                 // cuEventQuery
    int (*synchronize)(Handle event);                                                           // cuEventSynchronize
    int (*elapsed)(float* milliseconds, Handle earlier, Handle later);                          // cuEventElapsedTime
    int (*describe)(int code, const char** text);                                               // cuGetErrorString

    // Polls for at most so many seconds. False: the event has not happened.
    bool happens(Handle event, double seconds) const {
        const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        for (;;) {
            const int code = query(event);
            if (code != kNotReady) return check(code), true;
            if (std::chrono::steady_clock::now() > until) return false;
        }
    }
    // Throws what a call says that failed.
    void check(int code) const {
        if (!code) return;
        const char* text = nullptr;
        if (describe(code, &text) || !text) text = "unknown";
        throw CopyFailed(std::string(text) + " (error " + std::to_string(code) + " of the GPU's driver)");
    }
};

}  // namespace tiermoe::core
