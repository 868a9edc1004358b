// Threads of a block as fibers on one CPU thread: each runs until it waits, in an order that a seed decides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

constexpr size_t kStack = 128 << 10;

#if defined(__x86_64__)
using Frame = void*;
// Saves the callee-saved registers and the stack pointer in *from, goes on where `to` was saved.
__attribute__((naked, noinline)) inline void switch_frame(Frame*, Frame) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}
inline Frame new_frame(char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(stack + kStack) - 2;  // so that `entry` finds the alignment of a call
  *top = reinterpret_cast<void*>(entry);
  for (int r = 0; r < 6; ++r) *--top = nullptr;
  return top;
}
#else
using Frame = std::shared_ptr<ucontext_t>;
inline void switch_frame(Frame* from, Frame to) {
  if (!*from) *from = std::make_shared<ucontext_t>();
  swapcontext(from->get(), to.get());
}
inline Frame new_frame(char* stack, void (*entry)()) {
  auto frame = std::make_shared<ucontext_t>();
  getcontext(frame.get());
  frame->uc_stack.ss_sp = stack;
  frame->uc_stack.ss_size = kStack;
  makecontext(frame.get(), entry, 0);
  return frame;
}
#endif

// Fibers that share a body. Their stacks outlive a run.
class Fibers {
 public:
  // Starts `count` fibers; none has run yet.
  void start(int count, std::function<void()> body) {
    body_ = std::move(body);
    while (static_cast<int>(stacks_.size()) < count) stacks_.push_back(std::make_unique<char[]>(kStack));
#if defined(__SANITIZE_ADDRESS__)
    for (const auto& stack : stacks_)
      ASAN_UNPOISON_MEMORY_REGION(stack.get(), kStack);  // of frames that never returned
#endif
    frames_.clear();
    for (int i = 0; i < count; ++i) frames_.push_back(new_frame(stacks_[i].get(), &Fibers::entry));
    done_.assign(count, false);
    error_ = nullptr;
  }

  // Runs fiber i until it waits or returns; throws what it threw.
  void resume(int i) {
    current_ = i;
    active() = this;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stacks_[i].get(), kStack);
#endif
    switch_frame(&main_, frames_[i]);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    if (error_) std::rethrow_exception(error_);
  }

  // Back to `resume`, from inside a fiber.
  void wait() {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(done_[current_] ? nullptr : &fake, main_bottom_, main_size_);
#endif
    switch_frame(&frames_[current_], main_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &main_bottom_, &main_size_);
#endif
  }

  bool done(int i) const { return done_[i]; }

 private:
  static Fibers*& active() {
    static Fibers* fibers = nullptr;
    return fibers;
  }
  static void entry() {
    Fibers& self = *active();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &self.main_bottom_, &self.main_size_);
#endif
    try {
      self.body_();
    } catch (...) {
      self.error_ = std::current_exception();
    }
    self.done_[self.current_] = true;
    self.wait();
    std::terminate();
  }

  std::function<void()> body_;
  std::vector<std::unique_ptr<char[]>> stacks_;
  std::vector<Frame> frames_;
  std::vector<bool> done_;
  std::exception_ptr error_;
  Frame main_{};
  int current_ = 0;
  [[maybe_unused]] const void* main_bottom_ = nullptr;
  [[maybe_unused]] size_t main_size_ = 0;
};

}  // namespace emulator
