// One process of the load generator, compiled: the same loop as sender.py over epoll, for a fraction of its time.
//
// Reads a job from stdin and writes the outcome to stdout, both in native byte order, as compiled_sender.py packs them:
//   job: head; count times {u64 length, bytes} requests; dues times f64 due times
//   outcome: {u64 finished, u64 unanswered}; finished times {f64 due, f64 done, u32 request, u32 status, u64 length};
//   the kept bodies, one after another
// Times are seconds of CLOCK_MONOTONIC. A mistake of the machine or of the server is one line on stderr and status 2.

#include <signal.h>

#include <deque>
#include <memory>
#include <vector>

#include "http_answer.h"
#include "polling.h"

namespace {

using polling::fail;
using polling::now_s;
using polling::read_all;

constexpr double kReconnectS = 0.001;
constexpr double kLateS = 0.005;  // as LATE_S of sender.py
constexpr int kMaxOpening = 64;
constexpr uint32_t kNone = UINT32_MAX;

struct Head {
  double start_s, measured_from_s, end_s, stragglers_s;
  uint64_t connections, keep_every, requests, dues;
  uint32_t port, ipv6, closed_loop, unused;
  char address[polling::kAddressBytes];  // numeric
};

struct Finished {
  double due_s, done_s;
  uint32_t request, status;
  uint64_t length;
};

struct Connection {
  int socket = -1;
  bool opening = true;
  uint32_t request = kNone;
  double due_s = 0;
  const std::string* unsent = nullptr;
  size_t sent = 0;
  std::string buffer;
};

struct Queued {
  double due_s;
  uint32_t request;
};

class Sender {
 public:
  Sender(const Head& job, std::vector<std::string> requests, std::vector<double> dues)
      : job_(job),
        server_(job.address, job.port, job.ipv6),
        requests_(std::move(requests)),
        dues_(std::move(dues)),
        missing_(job.connections) {
    finished_.reserve(dues_.size());
    scratch_.resize(polling::kReadBytes);
  }

  void run() {
    poll_until([this] { return free_.size() == job_.connections; }, job_.start_s);
    polling::sleep_until(job_.start_s);
    if (job_.closed_loop) {
      std::deque<Connection*> waiting;
      waiting.swap(free_);
      for (Connection* connection : waiting) send_next(connection);
    }
    poll_until([] { return false; }, job_.end_s);
    poll_until([this] { return all_answered(); }, now_s() + job_.stragglers_s);
  }

  void write_outcome() const {
    uint64_t counts[4] = {finished_.size(), started_ - finished_.size(), late_, queued_count_};
    fwrite(counts, sizeof counts, 1, stdout);
    fwrite(finished_.data(), sizeof(Finished), finished_.size(), stdout);
    fwrite(bodies_.data(), 1, bodies_.size(), stdout);
    if (fflush(stdout) != 0) fail("the outcome cannot be written");
  }

 private:
  double next_due() const { return due_ < dues_.size() ? dues_[due_] : INFINITY; }

  bool all_answered() const {
    return due_ == dues_.size() && started_ + queue_.size() <= finished_.size() + broken_;
  }

  template <typename Over>
  void poll_until(Over over, double end_s) {
    for (double now; (now = now_s()) < end_s && !over();) {
      // Not at once when one breaks: its events of the same poll would go to its successor.
      if (missing_ > 0 && now >= open_again_s_ && now < job_.end_s) open_some();
      retired_.clear();
      if (next_due() <= now) send_due(now);
      poll_.wait(std::min({next_due(), end_s, now + polling::kMaxWaitS}), [this](void* owner, uint32_t events) {
        Connection* connection = static_cast<Connection*>(owner);
        if (connection->socket >= 0) handle(connection, events);
      });
    }
  }

  void send_due(double now) {
    for (; next_due() <= now; ++due_) {
      uint32_t request = static_cast<uint32_t>(due_ % requests_.size());
      bool counted = dues_[due_] >= job_.measured_from_s;
      late_ += counted && now - dues_[due_] > kLateS;
      queued_count_ += counted && free_.empty();
      if (free_.empty()) {
        queue_.push_back({dues_[due_], request});
      } else {
        Connection* connection = free_.front();
        free_.pop_front();
        ++started_;
        send(connection, dues_[due_], request);
      }
    }
  }

  void send_next(Connection* connection) {
    double now = now_s();
    if (job_.closed_loop && now >= job_.start_s && now < job_.end_s) {
      ++started_;
      send(connection, now, static_cast<uint32_t>(started_ % requests_.size()));
    } else if (!queue_.empty()) {
      Queued next = queue_.front();
      queue_.pop_front();
      ++started_;
      send(connection, next.due_s, next.request);
    } else {
      free_.push_back(connection);
    }
  }

  void send(Connection* connection, double due_s, uint32_t request) {
    connection->due_s = due_s;
    connection->request = request;
    connection->unsent = &requests_[request];
    connection->sent = 0;
    if (!flush(connection)) poll_.change(connection->socket, EPOLLIN | EPOLLOUT, connection);
  }

  // Whether nothing is left to send on an open connection.
  bool flush(Connection* connection) {
    const std::string& data = *connection->unsent;
    size_t left = data.size() - connection->sent;
    ssize_t count = ::send(connection->socket, data.data() + connection->sent, left, MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN) {
      lose(connection);
      return true;
    }
    connection->sent += static_cast<size_t>(std::max<ssize_t>(count, 0));
    if (connection->sent < data.size()) return false;
    connection->unsent = nullptr;
    return true;
  }

  void open_some() {
    while (missing_ > 0 && opening_ < kMaxOpening) {
      --missing_;
      ++opening_;
      connections_.push_back(std::make_unique<Connection>());
      Connection* connection = connections_.back().get();
      connection->socket = server_.connect();
      poll_.add(connection->socket, EPOLLOUT, connection);
    }
  }

  void handle(Connection* connection, uint32_t events) {
    if (connection->opening) {
      if (polling::connect_error(connection->socket) != 0) {
        open_again_s_ = now_s() + kReconnectS;
        lose(connection);
        return;
      }
      --opening_;
      connection->opening = false;
      poll_.change(connection->socket, EPOLLIN, connection);
      send_next(connection);
      return;
    }
    // First: a server may answer and close before it has read everything.
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
      ssize_t count = recv(connection->socket, scratch_.data(), scratch_.size(), 0);
      if (count > 0) {
        receive(connection, static_cast<size_t>(count));
      } else if (count == 0 || errno != EAGAIN) {
        lose(connection);
      }
    } else if (connection->unsent != nullptr && flush(connection) && connection->socket >= 0) {
      poll_.change(connection->socket, EPOLLIN, connection);
    }
  }

  void receive(Connection* connection, size_t count) {
    const char* data = scratch_.data();
    if (!connection->buffer.empty()) {
      connection->buffer.append(data, count);
      data = connection->buffer.data();
      count = connection->buffer.size();
    }
    size_t head = http_answer::head_size(data, count);
    size_t whole = head == 0 ? SIZE_MAX : head + http_answer::content_length(data, head);
    if (count < whole) {
      if (connection->buffer.empty()) connection->buffer.assign(data, count);
      return;
    }
    double now = now_s();
    if (connection->request != kNone) {
      uint32_t status = static_cast<uint32_t>(http_answer::status(data));
      bool kept = status == 200 && finished_.size() % job_.keep_every == 0;
      finished_.push_back({connection->due_s, now, connection->request, status, kept ? whole - head : 0});
      if (kept) bodies_.insert(bodies_.end(), data + head, data + whole);
    }
    bool closes = http_answer::closes(data, head);
    connection->request = kNone;
    bool sent_all = connection->unsent == nullptr;
    connection->buffer.clear();
    if (closes || !sent_all) {
      lose(connection);
    } else {
      send_next(connection);
    }
    // Between answers, because a poll may bring many: requests due meanwhile would go out in a burst.
    if (next_due() <= now) send_due(now);
  }

  void lose(Connection* connection) {
    opening_ -= connection->opening;
    broken_ += connection->request != kNone;
    auto at = std::find(free_.begin(), free_.end(), connection);
    if (at != free_.end()) free_.erase(at);
    close(connection->socket);
    connection->socket = -1;
    ++missing_;
    // Events of the same poll may still name it.
    auto is_it = [&](const auto& each) { return each.get() == connection; };
    auto owner = std::find_if(connections_.begin(), connections_.end(), is_it);
    retired_.push_back(std::move(*owner));
    *owner = std::move(connections_.back());
    connections_.pop_back();
  }

  const Head job_;
  const polling::Server server_;
  const std::vector<std::string> requests_;
  const std::vector<double> dues_;
  uint64_t missing_;
  polling::Poll poll_;
  int opening_ = 0;
  double open_again_s_ = 0;
  size_t due_ = 0;
  uint64_t started_ = 0, broken_ = 0;
  uint64_t late_ = 0, queued_count_ = 0;
  std::vector<std::unique_ptr<Connection>> connections_, retired_;
  std::deque<Connection*> free_;
  std::deque<Queued> queue_;
  std::vector<Finished> finished_;
  std::vector<char> bodies_, scratch_;
};

}  // namespace

int main() {
  signal(SIGPIPE, SIG_IGN);
  Head job;
  read_all(&job, sizeof job);
  std::vector<std::string> requests(job.requests);
  for (std::string& request : requests) {
    uint64_t length;
    read_all(&length, sizeof length);
    request.resize(length);
    read_all(request.data(), length);
  }
  std::vector<double> dues(job.dues);
  read_all(dues.data(), dues.size() * sizeof(double));
  Sender sender(job, std::move(requests), std::move(dues));
  sender.run();
  sender.write_outcome();
}
