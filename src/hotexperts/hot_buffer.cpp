// See hot_buffer.h.
#include "hot_buffer.h"

#include "ggml-backend-impl.h"
#include "ggml-cuda.h"
#include "ggml-impl.h"
#include "host_memory.h"

#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace hx {

namespace {

constexpr size_t HUGE_PAGE = size_t(2) << 20;
constexpr size_t ALIGNMENT = 128;

struct device_object {
    int device;
    std::string name;
    ggml_backend_device dev;
    ggml_backend_buffer_type buft;
};

struct hot_buffer {
    void * base = nullptr;
    size_t size = 0;
    size_t mapped = 0;  // bytes of our own mapping, 0 = the memory is the caller's
    std::unique_ptr<pinned_range> pin;  // NULL = not tried yet

    ~hot_buffer() {
        pin.reset();  // before the memory goes
        if (mapped) {
            munmap(base, mapped);
        }
    }
};

device_object * object_of(ggml_backend_dev_t dev) {
    return static_cast<device_object *>(dev->context);
}

// ---------------------------------------------------------------- buffer

void buffer_free(ggml_backend_buffer_t buffer) {
    delete static_cast<hot_buffer *>(buffer->context);
}

void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return static_cast<hot_buffer *>(buffer->context)->base;
}

void buffer_memset(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    memset(static_cast<char *>(tensor->data) + offset, value, size);
}

void buffer_set(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    memcpy(static_cast<char *>(tensor->data) + offset, data, size);
}

void buffer_get(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

bool buffer_copy(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    if (!ggml_backend_buffer_is_host(src->buffer)) {
        return false;
    }
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    memset(static_cast<hot_buffer *>(buffer->context)->base, value, buffer->size);
}

const ggml_backend_buffer_i BUFFER = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ buffer_memset,
    /* .set_tensor    = */ buffer_set,
    /* .get_tensor    = */ buffer_get,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ buffer_copy,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

ggml_backend_buffer_t make_buffer(device_object * object, std::unique_ptr<hot_buffer> b, size_t size) {
    b->size = size;
    return ggml_backend_buffer_init(&object->buft, BUFFER, b.release(), size);
}

// ---------------------------------------------------------------- buffer type

const char * type_get_name(ggml_backend_buffer_type_t buft) {
    return static_cast<device_object *>(buft->context)->name.c_str();
}

// Anonymous memory in huge pages where the system has them: they are worth 15-25 % of the CPU lane (docs/design-notes.md).
ggml_backend_buffer_t type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    const size_t rounded = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void * raw = mmap(nullptr, rounded + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) {
        GGML_LOG_ERROR("%s: failed to allocate %zu MiB of RAM\n", type_get_name(buft), size >> 20);
        return nullptr;
    }
    // keep the part that begins at a huge page
    char * begin = static_cast<char *>(raw);
    const size_t skip = (HUGE_PAGE - reinterpret_cast<uintptr_t>(begin) % HUGE_PAGE) % HUGE_PAGE;
    if (skip) {
        munmap(begin, skip);
    }
    munmap(begin + skip + rounded, HUGE_PAGE - skip);
    madvise(begin + skip, rounded, MADV_HUGEPAGE);  // a wish: without huge pages it is only slower
    auto b = std::make_unique<hot_buffer>();
    b->base = begin + skip;
    b->mapped = rounded;
    return make_buffer(static_cast<device_object *>(buft->context), std::move(b), size);
}

size_t type_get_alignment(ggml_backend_buffer_type_t) {
    return ALIGNMENT;
}

bool type_is_host(ggml_backend_buffer_type_t) {
    return true;
}

const ggml_backend_buffer_type_i TYPE = {
    /* .get_name       = */ type_get_name,
    /* .alloc_buffer   = */ type_alloc_buffer,
    /* .get_alignment  = */ type_get_alignment,
    /* .get_max_size   = */ nullptr,
    /* .get_alloc_size = */ nullptr,
    /* .is_host        = */ type_is_host,
};

// ---------------------------------------------------------------- device

const char * dev_get_name(ggml_backend_dev_t dev) {
    return object_of(dev)->name.c_str();
}

void dev_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = 0;
    *total = 0;
}

enum ggml_backend_dev_type dev_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void dev_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props = {};
    props->name = dev_get_name(dev);
    props->description = dev_get_name(dev);
    props->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
    props->caps.buffer_from_host_ptr = true;
    props->caps.mmap_support = true;
}

ggml_backend_t dev_init_backend(ggml_backend_dev_t, const char *) {
    return nullptr;
}

ggml_backend_buffer_type_t dev_get_buffer_type(ggml_backend_dev_t dev) {
    return &object_of(dev)->buft;
}

ggml_backend_buffer_t dev_buffer_from_host_ptr(ggml_backend_dev_t dev, void * ptr, size_t size, size_t) {
    auto b = std::make_unique<hot_buffer>();
    b->base = ptr;
    return make_buffer(object_of(dev), std::move(b), size);
}

bool dev_supports_op(ggml_backend_dev_t, const ggml_tensor *) {
    return false;
}

bool dev_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == &object_of(dev)->buft;
}

ggml_backend_device_i device_interface() {
    ggml_backend_device_i i = {};
    i.get_name = dev_get_name;
    i.get_description = dev_get_name;
    i.get_memory = dev_get_memory;
    i.get_type = dev_get_type;
    i.get_props = dev_get_props;
    i.init_backend = dev_init_backend;
    i.get_buffer_type = dev_get_buffer_type;
    i.buffer_from_host_ptr = dev_buffer_from_host_ptr;
    i.supports_op = dev_supports_op;
    i.supports_buft = dev_supports_buft;
    return i;
}

const std::vector<std::unique_ptr<device_object>> & objects() {
    static const auto & all = *[] {  // never destroyed: buffers point at them
        auto * made = new std::vector<std::unique_ptr<device_object>>;
        std::vector<std::unique_ptr<device_object>> & v = *made;
        ggml_backend_reg_t reg = ggml_backend_cuda_reg();
        for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
            auto o = std::make_unique<device_object>();
            o->device = int(i);
            o->name = std::string(ggml_backend_dev_name(ggml_backend_reg_dev_get(reg, i))) + "_HotExperts";
            o->dev = { device_interface(), nullptr, o.get() };
            o->buft = { TYPE, &o->dev, o.get() };
            v.push_back(std::move(o));
        }
        return made;
    }();
    return all;
}

hot_buffer * buffer_of(ggml_backend_buffer_t buffer) {
    return buffer && hot_buffer_device(buffer->buft) >= 0 ? static_cast<hot_buffer *>(buffer->context) : nullptr;
}

}  // namespace

ggml_backend_buffer_type_t hot_buffer_type(int device) {
    return device >= 0 && size_t(device) < objects().size() ? &objects()[size_t(device)]->buft : nullptr;
}

int hot_buffer_device(ggml_backend_buffer_type_t buft) {
    return buft && buft->iface.get_name == type_get_name ? static_cast<device_object *>(buft->context)->device : -1;
}

void hot_buffer_pin(ggml_backend_buffer_t buffer) {
    hot_buffer * b = buffer_of(buffer);
    if (!b || b->pin) {
        return;
    }
    b->pin = std::make_unique<pinned_range>();
    b->pin->pin(b->base, b->size, /*read_only=*/b->mapped == 0);
}

bool hot_buffer_is_pinned(ggml_backend_buffer_t buffer) {
    const hot_buffer * b = buffer_of(buffer);
    return b && b->pin && b->pin->is_pinned();
}

std::string hot_buffer_reason(ggml_backend_buffer_t buffer) {
    const hot_buffer * b = buffer_of(buffer);
    return b && b->pin ? b->pin->reason() : "";
}

}  // namespace hx
