#include "fibers.h"

#include <stdint.h>

namespace emulated {

#if defined(__x86_64__)

// Saves the registers that a call must preserve, and switches stacks. `swapcontext` also sets the signal mask, which
// takes two system calls for each switch, and a warp's sum takes 160 switches.
extern "C" void emulated_switch(void **from, void *to);
__asm__(R"(
    .text
    .globl emulated_switch
    .hidden emulated_switch
    .type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulated_switch, .-emulated_switch
)");

void Fiber::prepare(char *stack, size_t bytes, void (*run)()) {
    void **top = (void **)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
    *--top = nullptr;  // the return address of `run`; it also aligns the stack as after a call
    *--top = (void *)run;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    stack_pointer_ = top;
}

void Fiber::switch_to(Fiber &to) { emulated_switch(&stack_pointer_, to.stack_pointer_); }

#else

void Fiber::prepare(char *stack, size_t bytes, void (*run)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, run, 0);
}

void Fiber::switch_to(Fiber &to) { swapcontext(&context_, &to.context_); }

#endif

}  // namespace emulated
