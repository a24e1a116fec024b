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
    inline void switch_to(Fiber &to);

private:
#if defined(__x86_64__)
    void *stack_pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
};

#if defined(__x86_64__)

// Switches stacks in place. `swapcontext` also sets the signal mask, which takes two system calls for each switch, and a
// warp's sum takes 160 switches. A function that switches would return to another caller than the processor predicts.
// The compiler saves what it needs of the registers listed last. It uses 128 bytes below the stack pointer.
__attribute__((always_inline)) inline void Fiber::switch_to(Fiber &to) {
    void **from_pointer = &stack_pointer_;
    void *to_pointer = to.stack_pointer_;
    __asm__ volatile(R"(
    leaq 1f(%%rip), %%rax
    subq $128, %%rsp
    pushq %%rbp
    pushq %%rbx
    pushq %%rax
    movq %%rsp, (%0)
    movq %1, %%rsp
    popq %%rax
    jmp *%%rax
1:
    popq %%rbx
    popq %%rbp
    addq $128, %%rsp
)"
                     : "+D"(from_pointer), "+S"(to_pointer)
                     :
                     : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0",
                       "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
                       "xmm13", "xmm14", "xmm15"
#if defined(__AVX512F__)
                       , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26",
                       "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#endif
    );
}

#else

inline void Fiber::switch_to(Fiber &to) { swapcontext(&context_, &to.context_); }

#endif

}  // namespace emulated
