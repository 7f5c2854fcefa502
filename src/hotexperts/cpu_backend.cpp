// For builds with one loadable CPU backend per instruction set: the two functions of ggml-cpu that the CPU lane calls, taken
// from the backend that was loaded.
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <dlfcn.h>

#include <stdexcept>

namespace {

void * symbol(const char * name) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void * inside = cpu ? ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_set_n_threads") : nullptr;
    Dl_info info;
    if (!inside || !dladdr(inside, &info)) {
        throw std::runtime_error("the CPU backend was not found");
    }
    void * library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    void * found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        throw std::runtime_error(std::string("the CPU backend has no ") + name);
    }
    return found;
}

}  // namespace

extern "C" const ggml_type_traits_cpu * ggml_get_type_traits_cpu(ggml_type type) {
    static const auto call = reinterpret_cast<const ggml_type_traits_cpu * (*) (ggml_type)>(symbol("ggml_get_type_traits_cpu"));
    return call(type);
}

extern "C" void ggml_cpu_init(void) {
    static const auto call = reinterpret_cast<void (*)()>(symbol("ggml_cpu_init"));
    call();
}
