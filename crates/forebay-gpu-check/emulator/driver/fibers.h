// Fibers: threads of the GPU as contexts of one host thread.
#pragma once

#include <stddef.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulated {

class Fiber {
public:
    // Makes the fiber start `run` on its own stack when it is first switched to. `run` never returns.
    void prepare(char *stack, size_t bytes, void (*run)());
    // Continues with `to`. Returns when another fiber switches back to this one.
    void switch_to(Fiber &to);

private:
#if defined(__x86_64__)
    void *stack_pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
};

}  // namespace emulated
