#include "frame.hpp"

#include <cstring>

namespace tiermoe {
namespace {

constexpr unsigned char BODY = 0x3A, LAYOUT = 0x42, PADDING = 0x4A, PAYLOAD = 0x52;
constexpr std::size_t ALIGNMENT = 16;
constexpr int MOST_SHIFT = 28;  // lengths take five bytes at most

// Little-endian, as protobuf's fixed fields are; the rings and the arrays are only used where the machine is too.
template <typename Word>
unsigned char* put(unsigned char* at, unsigned char tag, Word value) {
    *at++ = tag;
    std::memcpy(at, &value, sizeof(Word));
    return at + sizeof(Word);
}

unsigned char* put_length(unsigned char* at, unsigned char tag, std::size_t length) {
    *at++ = tag;
    for (; length > 0x7F; length >>= 7) *at++ = static_cast<unsigned char>(length & 0x7F) | 0x80;
    *at++ = static_cast<unsigned char>(length);
    return at;
}

unsigned char* put_bytes(unsigned char* at, const void* data, std::size_t size) {
    if (size > 0) std::memcpy(at, data, size);
    return at + size;
}

struct Reader {
    const unsigned char* data;
    std::size_t size;
    std::size_t at;

    template <typename Word>
    bool get(unsigned char tag, Word* value) {
        if (size - at < 1 + sizeof(Word) || data[at] != tag) return false;
        std::memcpy(value, data + at + 1, sizeof(Word));
        at += 1 + sizeof(Word);
        return true;
    }

    // Moves to the end of a field of bytes.
    bool field(unsigned char tag, std::size_t* begin) {
        if (at >= size || data[at] != tag) return false;
        std::size_t length = 0;
        for (int shift = 0;; shift += 7) {
            if (++at >= size || shift > MOST_SHIFT) return false;
            length |= static_cast<std::size_t>(data[at] & 0x7F) << shift;
            if (data[at] < 0x80) break;
        }
        *begin = ++at;
        if (length > size - at) return false;
        at += length;
        return true;
    }
};

}  // namespace

std::size_t frame_head(const FrameNumbers& numbers, const void* body, std::size_t body_size, const void* layout,
                       std::size_t layout_size, std::size_t payload_size, unsigned char* into) {
    unsigned char* at = put(into, 0x09, numbers.client);
    at = put(at, 0x11, numbers.request);
    at = put(at, 0x19, numbers.settled);
    at = put(at, 0x21, numbers.deadline_ns);
    at = put(at, 0x2D, numbers.role);
    at = put(at, 0x35, numbers.kind);
    at = put_bytes(put_length(at, BODY, body_size), body, body_size);
    at = put_bytes(put_length(at, LAYOUT, layout_size), layout, layout_size);
    unsigned char last[16];
    const std::size_t last_size = static_cast<std::size_t>(put_length(last, PAYLOAD, payload_size) - last);
    const std::size_t before = static_cast<std::size_t>(at - into) + 2 + last_size;
    const std::size_t gap = (ALIGNMENT - before % ALIGNMENT) % ALIGNMENT;
    at = put_length(at, PADDING, gap);
    std::memset(at, 0, gap);
    at = put_bytes(at + gap, last, last_size);
    return static_cast<std::size_t>(at - into);
}

bool frame_parts(const unsigned char* data, std::size_t size, FrameNumbers* numbers, FrameParts* parts) {
    Reader reader{data, size, 0};
    std::size_t padding = 0;
    if (!reader.get(0x09, &numbers->client) || !reader.get(0x11, &numbers->request) ||
        !reader.get(0x19, &numbers->settled) || !reader.get(0x21, &numbers->deadline_ns) ||
        !reader.get(0x2D, &numbers->role) || !reader.get(0x35, &numbers->kind))
        return false;
    if (!reader.field(BODY, &parts->body)) return false;
    parts->body_end = reader.at;
    if (!reader.field(LAYOUT, &parts->layout)) return false;
    parts->layout_end = reader.at;
    return reader.field(PADDING, &padding) && reader.field(PAYLOAD, &parts->payload) && reader.at == size;
}

}  // namespace tiermoe
