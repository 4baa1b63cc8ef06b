// Where the bytes of segments lie, on the host and in slots, for a link that copies by addresses.
#pragma once

#include <cstdint>
#include <vector>

namespace tiermoe::core {

struct Places {
    struct Target {  // one tensor of the pool: of the slot at position p it begins at base + p * stride
        char* base;
        std::int64_t stride;
    };
    struct Source {
        const char* at;      // null: another link has it
        std::int64_t count;  // bytes, or elements where they are cast
        bool cast;           // to the slot's type: bfloat16 to float here, on a GPU any
        std::int64_t item = 2, slot_item = 4;  // bytes of an element that is cast

        std::int64_t bytes() const { return cast ? item * count : count; }
        std::int64_t slot_bytes() const { return cast ? slot_item * count : count; }
    };
    std::vector<std::vector<Target>> homes;  // of each form: the tensors of a slot
    std::vector<std::int32_t> home_of;       // [segments]
    std::vector<std::int64_t> position;      // [slots]: of a slot in its tensors, in their unit
    std::vector<Source> sources;             // [segments, tensors]
    std::int64_t tensors = 0;                // of a segment, at most
};

}  // namespace tiermoe::core
