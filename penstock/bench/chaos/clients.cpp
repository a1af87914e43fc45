// The clients of a chaos run, compiled: they do what clients.py does for a fraction of its time.
//
// Reads a job from stdin, sends until SIGTERM, waits for the last answers, and writes how each request ended to stdout,
// both in native byte order, as compiled_clients.py packs them:
//   job: head; models times {f64 share, u64 length, bytes} what comes before the length of the body
//   outcome: {f64 lateness, u64 sentences}; sentences times {u64 number, u64 length, bytes}, bodies of answers other than
//     200; the ends
// Times are seconds of CLOCK_MONOTONIC. A mistake of the machine or of the server is one line on stderr and status 2.

#include <signal.h>

#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "http_answer.h"
#include "polling.h"

namespace {

using polling::fail;
using polling::now_s;
using polling::read_all;

// As in numbered_input.py.
constexpr uint64_t kDigits = 1 << 12;
constexpr double kRetryS = 0.01, kPollS = 0.05;
// Bodies that are kept of answers other than 200: so many, and their first bytes.
constexpr size_t kSentences = 1000, kSentenceBytes = 300;
constexpr char kIdle[] = "HTTP/1.1 408 ";

volatile sig_atomic_t stopped = 0;

struct Head {
  double rate, hang_s, requests_each;
  uint64_t connections, seed, first;
  uint32_t models, port, ipv6, unused;
  char address[polling::kAddressBytes];  // numeric
};

struct Model {
  double share;
  std::string head;
};

enum Kind : uint32_t { kAnswer, kReset, kHung, kUnsent, kUnasked };

struct End {
  uint64_t number;
  double due_s, sent_s, ended_s, opened_s;
  double doubles[4];
  uint32_t model, end, status, port;
  int32_t weights, source;
};

struct Request {
  uint64_t number = 0;
  double due_s = 0;
  uint32_t model = 0;
};

struct Client {
  int socket = -1;
  bool opening = true, asked = false;
  double made_s = 0, sent_s = 0;
  uint32_t port = 0;
  uint64_t uses = 0;
  // The last one that was sent.
  Request request;
  std::string unsent, buffer;
};

class Clients {
 public:
  Clients(const Head& job, std::vector<Model> models)
      : job_(job),
        server_(job.address, job.port, job.ipv6),
        models_(std::move(models)),
        random_(job.seed),
        gap_(job.rate),
        uses_(1 / job.requests_each),
        next_(job.first) {
    std::vector<double> shares;
    for (const Model& model : models_) shares.push_back(model.share);
    choice_ = std::discrete_distribution<uint32_t>(shares.begin(), shares.end());
    scratch_.resize(polling::kReadBytes);
  }

  void run() {
    due_s_ = now_s();
    double end_s = INFINITY, poll_s = 0;
    for (double now; (now = now_s()) < end_s && !(end_s < INFINITY && is_over());) {
      if (now >= poll_s) {
        poll_s = now + kPollS;
        give_up(now);
        if (stopped && end_s == INFINITY) end_s = now + job_.hang_s + 1;
      }
      for (; due_s_ <= now && end_s == INFINITY; due_s_ += gap_(random_)) {
        late_s_.push_back(static_cast<float>(now - due_s_));
        queue_.push_back({next_++, due_s_, choice_(random_)});
      }
      send(now);
      retired_.clear();
      double until_s = std::min(poll_s, now + polling::kMaxWaitS);
      if (end_s == INFINITY) until_s = std::min(until_s, due_s_);
      poll_.wait(until_s, [this](void* owner, uint32_t events) {
        Client* client = static_cast<Client*>(owner);
        if (client->socket >= 0) handle(client, events);
      });
    }
    for (const auto& client : clients_)
      if (client->asked) end(client.get(), kHung);
    for (; !queue_.empty(); queue_.pop_front()) end_unsent(now_s());
  }

  void write_outcome() {
    double late_s = 0;
    if (!late_s_.empty()) {
      auto at = late_s_.begin() + static_cast<ptrdiff_t>(late_s_.size() * 99 / 100);
      std::nth_element(late_s_.begin(), at, late_s_.end());
      late_s = *at;
    }
    fwrite(&late_s, sizeof late_s, 1, stdout);
    write_number(sentences_.size());
    for (const auto& [number, sentence] : sentences_) {
      write_number(number);
      write_number(sentence.size());
      fwrite(sentence.data(), 1, sentence.size(), stdout);
    }
    for (const End& end : ends_) fwrite(&end, sizeof end, 1, stdout);
    if (fflush(stdout) != 0 || ferror(stdout)) fail("the outcome cannot be written");
  }

 private:
  bool is_over() const {
    return queue_.empty() && std::none_of(clients_.begin(), clients_.end(), [](const auto& each) { return each->asked; });
  }

  void send(double now) {
    while (!queue_.empty() && !free_.empty()) {
      Client* client = free_.front();
      free_.pop_front();
      ask(client, queue_.front());
      queue_.pop_front();
    }
    if (queue_.empty() || now < retry_s_) return;
    size_t opening = static_cast<size_t>(
        std::count_if(clients_.begin(), clients_.end(), [](const auto& each) { return each->opening; }));
    while (opening < queue_.size() && clients_.size() < job_.connections) {
      ++opening;
      clients_.push_back(std::make_unique<Client>());
      Client* client = clients_.back().get();
      client->made_s = now_s();
      client->uses = 1 + static_cast<uint64_t>(uses_(random_));
      client->socket = server_.connect();
      poll_.add(client->socket, EPOLLOUT, client);
    }
  }

  void ask(Client* client, const Request& request) {
    char body[96];
    int length = snprintf(body, sizeof body, "[%u.0, %u.0, %u.0, 1.0]", static_cast<unsigned>(request.number % kDigits),
                          static_cast<unsigned>(request.number / kDigits % kDigits),
                          static_cast<unsigned>(request.number / (kDigits * kDigits)));
    client->request = request;
    client->asked = true;
    client->sent_s = now_s();
    client->unsent += models_[request.model].head + std::to_string(length) + "\r\n\r\n" + body;
    flush(client);
  }

  void flush(Client* client) {
    if (client->unsent.empty()) return;
    ssize_t count = ::send(client->socket, client->unsent.data(), client->unsent.size(), MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN) return lose(client);
    client->unsent.erase(0, static_cast<size_t>(std::max<ssize_t>(count, 0)));
    poll_.change(client->socket, client->unsent.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT, client);
  }

  void handle(Client* client, uint32_t events) {
    if (client->opening) {
      if (polling::connect_error(client->socket) != 0) {
        retry_s_ = now_s() + kRetryS;
        return lose(client);
      }
      client->opening = false;
      client->port = own_port(client->socket);
      poll_.change(client->socket, EPOLLIN, client);
      free_.push_back(client);
      return;
    }
    // First: a server may answer and close before it has read everything.
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
      ssize_t count = recv(client->socket, scratch_.data(), scratch_.size(), 0);
      if (count > 0) {
        receive(client, static_cast<size_t>(count));
      } else if (count == 0 || errno != EAGAIN) {
        lose(client);
      }
    } else {
      flush(client);
    }
  }

  void receive(Client* client, size_t count) {
    client->buffer.append(scratch_.data(), count);
    const std::string& data = client->buffer;
    if (!client->asked) {
      // 408 before an idle connection is closed belongs to no request, and answers none.
      if (data.compare(0, sizeof kIdle - 1, kIdle) != 0) end(client, kUnasked);
      return lose(client);
    }
    size_t head = http_answer::head_size(data.data(), data.size());
    size_t whole = head == 0 ? SIZE_MAX : head + http_answer::content_length(data.data(), head);
    if (data.size() < whole) return;
    end(client, kAnswer, http_answer::status(data.data()), data.c_str() + head);
    bool more = data.size() > whole;
    if (more) end(client, kUnasked);
    bool closes = http_answer::closes(data.data(), head);
    client->buffer.clear();
    if (more || closes || --client->uses == 0) {
      lose(client);
    } else {
      free_.push_back(client);
    }
  }

  void end(Client* client, Kind kind, int status = 0, const char* body = "") {
    client->asked = false;
    const Request& request = client->request;
    End& end = ends_.emplace_back(End{request.number, request.due_s, client->sent_s, now_s(), client->made_s, {},
                                      request.model, kind, static_cast<uint32_t>(status), client->port, 0, 0});
    if (kind == kAnswer && (status < 100 || status > 599)) fail("an answer has no status: " + client->buffer);
    if (kind == kAnswer && status != 200 && sentences_.size() < kSentences)
      sentences_.emplace_back(request.number, std::string(body, strnlen(body, kSentenceBytes)));
    if (status != 200) return;
    const char* at = after(body, "\"doubles\":");
    for (double& each : end.doubles) each = at == nullptr ? NAN : next_number(&at);
    if (at != nullptr && at[strspn(at, " ")] != ']') end.doubles[0] = NAN;
    if ((at = after(body, "\"weights\":")) != nullptr) end.weights = static_cast<int32_t>(next_number(&at));
    if ((at = after(body, "\"source\":")) != nullptr) end.source = static_cast<int32_t>(next_number(&at));
  }

  static void write_number(uint64_t number) { fwrite(&number, sizeof number, 1, stdout); }

  static const char* after(const char* body, const char* name) {
    const char* at = strstr(body, name);
    return at == nullptr ? nullptr : at + strlen(name);
  }

  static double next_number(const char** at) {
    *at += strspn(*at, " [,");
    char* end;
    double value = strtod(*at, &end);
    if (end == *at) return NAN;
    *at = end;
    return value;
  }

  void end_unsent(double now) {
    const Request& request = queue_.front();
    ends_.push_back({request.number, request.due_s, request.due_s, now, 0, {}, request.model, kUnsent, 0, 0, 0, 0});
  }

  void give_up(double now) {
    for (size_t at = 0; at < clients_.size();) {
      Client* client = clients_[at].get();
      bool is_hung = client->asked && now - client->sent_s > job_.hang_s;
      if (is_hung) end(client, kHung);
      if (is_hung || (client->opening && now - client->made_s > job_.hang_s)) {
        lose(client);
      } else {
        ++at;
      }
    }
    for (; !queue_.empty() && now - queue_.front().due_s > job_.hang_s; queue_.pop_front()) end_unsent(now);
  }

  // Closes a connection; a request on it ended without an answer.
  void lose(Client* client) {
    if (client->asked) end(client, kReset);
    auto at = std::find(free_.begin(), free_.end(), client);
    if (at != free_.end()) free_.erase(at);
    close(client->socket);
    client->socket = -1;
    // Events of the same poll may still name it.
    auto owner = std::find_if(clients_.begin(), clients_.end(), [&](const auto& each) { return each.get() == client; });
    retired_.push_back(std::move(*owner));
    *owner = std::move(clients_.back());
    clients_.pop_back();
  }

  static uint32_t own_port(int socket) {
    sockaddr_in6 own{};
    socklen_t length = sizeof own;
    getsockname(socket, reinterpret_cast<sockaddr*>(&own), &length);
    // At the same place in the addresses of both families.
    return ntohs(own.sin6_port);
  }

  const Head job_;
  const polling::Server server_;
  const std::vector<Model> models_;
  std::mt19937_64 random_;
  std::exponential_distribution<double> gap_, uses_;
  uint64_t next_;
  std::discrete_distribution<uint32_t> choice_;
  polling::Poll poll_;
  double due_s_ = 0, retry_s_ = 0;
  std::deque<Request> queue_;
  std::vector<std::unique_ptr<Client>> clients_, retired_;
  std::deque<Client*> free_;
  // Not vectors, which copy millions of them when they grow.
  std::deque<End> ends_;
  std::deque<float> late_s_;
  std::vector<std::pair<uint64_t, std::string>> sentences_;
  std::vector<char> scratch_;
};

}  // namespace

int main() {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGTERM, [](int) { stopped = 1; });
  Head job;
  read_all(&job, sizeof job);
  std::vector<Model> models(job.models);
  for (Model& model : models) {
    uint64_t length;
    read_all(&model.share, sizeof model.share);
    read_all(&length, sizeof length);
    model.head.resize(length);
    read_all(model.head.data(), length);
  }
  Clients clients(job, std::move(models));
  clients.run();
  clients.write_outcome();
}
