// What the compiled senders share: the clock, the job on stdin, non-blocking sockets, a poll with a precise timer.

#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace polling {

constexpr double kMaxWaitS = 0.01;
constexpr int kAtOnce = 256;
constexpr size_t kReadBytes = 1 << 18;
constexpr size_t kAddressBytes = 64;

// Seconds of CLOCK_MONOTONIC.
inline double now_s() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + static_cast<double>(at.tv_nsec) * 1e-9;
}

inline void sleep_until(double when_s) {
  for (double left_s; (left_s = when_s - now_s()) > 0;)
    usleep(static_cast<useconds_t>(std::min(left_s, 0.5) * 1e6) + 1);
}

// Ends the process: a mistake of the machine or of the server is one line on stderr and status 2.
[[noreturn]] inline void fail(const std::string& reason) {
  fprintf(stderr, "%s\n", reason.c_str());
  exit(2);
}

inline void read_all(void* to, size_t length) {
  if (length > 0 && fread(to, 1, length, stdin) != length) fail("the job ends early");
}

// A numeric address and a port.
class Server {
 public:
  Server(const char (&address)[kAddressBytes], uint32_t port, bool ipv6) : ipv6_(ipv6) {
    char text[kAddressBytes];
    memcpy(text, address, sizeof text);
    text[sizeof text - 1] = 0;
    v6_.sin6_family = AF_INET6;
    v4_.sin_family = AF_INET;
    v6_.sin6_port = v4_.sin_port = htons(static_cast<uint16_t>(port));
    void* place = ipv6 ? static_cast<void*>(&v6_.sin6_addr) : static_cast<void*>(&v4_.sin_addr);
    if (inet_pton(ipv6 ? AF_INET6 : AF_INET, text, place) != 1) fail(std::string("no numeric address: ") + text);
  }

  // Begins to connect; the socket becomes writable when it is connected or has failed.
  int connect() const {
    int file = ::socket(ipv6_ ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (file < 0) fail(std::string("no socket can be opened: ") + strerror(errno));
    int on = 1;
    setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    const sockaddr* place = ipv6_ ? reinterpret_cast<const sockaddr*>(&v6_) : reinterpret_cast<const sockaddr*>(&v4_);
    if (::connect(file, place, ipv6_ ? sizeof v6_ : sizeof v4_) != 0 && errno != EINPROGRESS)
      fail(std::string("no connection can be opened: ") + strerror(errno));
    return file;
  }

 private:
  bool ipv6_;
  sockaddr_in6 v6_{};
  sockaddr_in v4_{};
};

// Why a socket that became writable is not connected; 0 if it is.
inline int connect_error(int file) {
  int reason = 0;
  socklen_t length = sizeof reason;
  getsockopt(file, SOL_SOCKET, SO_ERROR, &reason, &length);
  return reason;
}

// Sockets that are watched, each with the object that it belongs to.
class Poll {
 public:
  Poll() : poll_(epoll_create1(0)), timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)) {
    if (poll_ < 0 || timer_ < 0) fail(std::string("no poll can be opened: ") + strerror(errno));
    control(EPOLL_CTL_ADD, timer_, EPOLLIN, nullptr);
  }

  void add(int file, uint32_t events, void* owner) { control(EPOLL_CTL_ADD, file, events, owner); }

  void change(int file, uint32_t events, void* owner) { control(EPOLL_CTL_MOD, file, events, owner); }

  // Waits until a time, unless there are events, and calls handle(owner, events) for each.
  template <typename Handle>
  void wait(double until_s, Handle handle) {
    epoll_event events[kAtOnce];
    int count = epoll_wait(poll_, events, kAtOnce, 0);
    if (count == 0 && until_s > now_s()) {
      itimerspec when{};
      when.it_value.tv_sec = static_cast<time_t>(until_s);
      when.it_value.tv_nsec = static_cast<long>((until_s - std::floor(until_s)) * 1e9);
      timerfd_settime(timer_, TFD_TIMER_ABSTIME, &when, nullptr);
      count = epoll_wait(poll_, events, kAtOnce, -1);
    }
    for (int at = 0; at < count; ++at) {
      uint64_t expirations;
      if (events[at].data.ptr != nullptr) {
        handle(events[at].data.ptr, events[at].events);
      } else if (read(timer_, &expirations, sizeof expirations) < 0 && errno != EAGAIN) {
        fail("the timer cannot be read");
      }
    }
  }

 private:
  void control(int operation, int file, uint32_t events, void* owner) {
    epoll_event event{};
    event.events = events;
    event.data.ptr = owner;
    epoll_ctl(poll_, operation, file, &event);
  }

  int poll_, timer_;
};

}  // namespace polling
