// A card in host memory: streams are threads that do what they are given in order, some of it late.
//
// Nothing here knows CUDA's names. What is done wrong is kept as faults, in words.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace stub_card {

inline double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// What a test chooses.
struct Settings {
  size_t total_bytes = size_t(2) << 30, others_bytes = 0;  // other processes have the second of these
  // One of `late_every` copies and ops begins up to so much late.
  int64_t copies_late_us = 0, ops_late_us = 0;
  uint32_t late_every = 3;
  int64_t pins_left = -1;     // how many calls that pin memory go well; below 0 all do
};

inline Settings settings;
inline std::mutex mutex;  // of all that is below, and of settings
inline std::vector<std::string> faults;
inline std::mt19937 random_numbers{0};

inline void fault(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  faults.push_back(text);
}

inline int64_t next_delay_us(int64_t Settings::*most_us) {
  std::lock_guard<std::mutex> lock(mutex);
  if (settings.*most_us == 0 || random_numbers() % settings.late_every != 0) return 0;
  return int64_t(random_numbers() % uint64_t(settings.*most_us));
}

// Memory.

enum class Kind { unknown, device, pinned };

struct Range {
  size_t bytes;
  Kind kind;
};

inline std::map<uintptr_t, Range> ranges;
inline size_t used_bytes = 0;

// Of which kind all of these bytes are.
inline Kind kind_of(const void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto at = uintptr_t(address);
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return Kind::unknown;
  auto found = std::prev(next);
  bool inside = at + bytes <= found->first + found->second.bytes && at < found->first + found->second.bytes;
  return inside ? found->second.kind : Kind::unknown;
}

// Streams and events.

class Moment {
 public:
  void come() {
    std::lock_guard<std::mutex> lock(mutex_);
    at_s_ = now_s();
    came_ = true;
    changed_.notify_all();
  }
  bool has_come() {
    std::lock_guard<std::mutex> lock(mutex_);
    return came_;
  }
  double wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [this] { return came_; })) {
      fault("an event had not come after a minute");
    }
    return at_s_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool came_ = false;
  double at_s_ = 0;
};

class Stream {
 public:
  Stream() : worker_([this] { run(); }) {}
  ~Stream() {
    give(nullptr);
    worker_.join();
  }
  void give(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  std::shared_ptr<Moment> mark() {
    auto moment = std::make_shared<Moment>();
    give([moment] { moment->come(); });
    return moment;
  }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !at_work_;
  }

 private:
  void run() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        at_work_ = false;
        changed_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
        at_work_ = true;
      }
      if (!work) return;
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool at_work_ = false;
  std::thread worker_;
};

inline void sleep_us(int64_t us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace stub_card
