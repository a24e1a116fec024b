#include "fibers.h"

#include <stdint.h>

namespace emulated {

#if defined(__x86_64__)

void Fiber::prepare(char *stack, size_t bytes, void (*run)()) {
    void **top = (void **)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
    *--top = nullptr;  // the return address of `run`; it also aligns the stack as after a call
    *--top = (void *)run;
    stack_pointer_ = top;
}

#else

void Fiber::prepare(char *stack, size_t bytes, void (*run)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, run, 0);
}

#endif

}  // namespace emulated
