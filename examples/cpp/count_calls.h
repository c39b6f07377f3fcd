// Counts the calls of operators by name, seen where the dispatcher reports them to the profiler.
#pragma once

#include <ATen/record_function.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

class CountCalls {
 public:
  CountCalls() {
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&enter, &leave).scopes({at::RecordScope::FUNCTION}));
  }
  ~CountCalls() { at::removeCallback(handle_); }
  CountCalls(const CountCalls&) = delete;
  CountCalls& operator=(const CountCalls&) = delete;

  // Since the program's start, on all threads.
  int operator[](const std::string& name) const {
    const std::lock_guard<std::mutex> lock(mutex());
    return counts()[name];
  }

 private:
  struct Enclosing : at::ObserverContext {
    explicit Enclosing(std::string outer) : outer(std::move(outer)) {}
    std::string outer;
  };

  // An operator's autograd kernel calls the operator again: one call of the user's, so one count.
  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
    auto enclosing = std::make_unique<Enclosing>(current());
    if (current() != function.name()) {
      const std::lock_guard<std::mutex> lock(mutex());
      ++counts()[function.name()];
    }
    current() = function.name();
    return enclosing;
  }
  static void leave(const at::RecordFunction&, at::ObserverContext* context) {
    current() = static_cast<Enclosing*>(context)->outer;
  }

  static std::string& current() {
    thread_local std::string name;
    return name;
  }
  static std::map<std::string, int>& counts() {
    static std::map<std::string, int> counts;
    return counts;
  }
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  at::CallbackHandle handle_;
};
