// The fixed form of a frame (codec.py says which bytes), written and read without protobuf.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tiermoe {

struct FrameNumbers {
    std::uint64_t client, request, settled, deadline_ns;
    std::uint32_t role, kind;
};

// Offsets of the parts within the frame; the payload ends with it.
struct FrameParts {
    std::size_t body, body_end, layout, layout_end, payload;
};

// Bytes that frame_head needs at most beside body and layout.
constexpr std::size_t FRAME_HEAD_ROOM = 128;

// Writes all that comes before the payload and returns its bytes, a multiple of 16.
std::size_t frame_head(const FrameNumbers& numbers, const void* body, std::size_t body_size, const void* layout,
                       std::size_t layout_size, std::size_t payload_size, unsigned char* into);

// False: the bytes are not in the fixed form.
bool frame_parts(const unsigned char* data, std::size_t size, FrameNumbers* numbers, FrameParts* parts);

}  // namespace tiermoe
