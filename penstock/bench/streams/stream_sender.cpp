// One process of the load generator for live streams, compiled: what stream_sender.py does over WebSockets, over epoll.
//
// Reads a job from stdin, writes the outcome to stdout, both in native byte order, as compiled_streams.py packs them:
//   job: head; {u64 length, bytes} of the upgrade request and of the start; f64 phase of each stream;
//   chunks of each sound, one after another
//   outcome: one line of JSON; f64 latencies; f64 lateness of the sends; the kept outputs, one after another
// Times are seconds of CLOCK_MONOTONIC. A mistake of the machine or of the server is one line on stderr and status 2.

#include <signal.h>
#include <sys/resource.h>

#include <map>
#include <numeric>
#include <utility>

#include "streams/connections.h"

namespace {

using connections::Connection;
using polling::fail;
using polling::now_s;
using polling::read_all;

// Chunks that are due within this time go out together: one per cent of the shortest usual period.
constexpr double kGatherS = 0.0002;
constexpr size_t kResultHead = 8;
constexpr size_t kMaxShown = 200;
constexpr uint64_t kMaxStreams = 1 << 20, kMaxChunk = 1 << 26, kMaxBytes = uint64_t{1} << 34;
constexpr uint64_t kMaxReserved = 1 << 24;

struct Head {
  double start_s, open_s, measured_from_s, end_s, stragglers_s, period_s;
  // Streams on one connection, 0 where each has its own; outputs of one of `check_every` streams are kept.
  uint64_t streams, per_connection, check_every;
  // Of the signals; of a frame of outputs, and of all outputs of a stream, 0 to check nothing.
  uint64_t sounds, chunks, chunk_bytes, frame_bytes, output_bytes;
  uint32_t port, ipv6;
  char address[polling::kAddressBytes];  // numeric
};

struct Job {
  Head head;
  std::string upgrade, start;
  std::vector<double> phases;
  std::string samples;
};

struct Stream {
  enum State { kOpening, kLive, kEnded };
  Connection* connection;
  uint64_t index;
  State state = kOpening;
  // Cycle of the schedule in which the first chunk is due.
  uint64_t first_cycle = 0;
  // Chunks that were due, were sent, and are confirmed; the number of the next result.
  uint64_t due = 0, sent = 0, confirmed = 0, next_result = 0;
  uint64_t window = 1;
  // Measured chunks without a result.
  uint64_t waiting = 0;
  std::vector<bool> answered;
  std::string kept;
};

class StreamSender final : connections::Receiver {
 public:
  explicit StreamSender(Job job)
      : job_(std::move(job)),
        by_phase_(head_.streams),
        position_(head_.streams),
        connections_({head_.address, head_.port, head_.ipv6 != 0}, job_.upgrade, is_shared(), *this) {
    std::iota(by_phase_.begin(), by_phase_.end(), 0);
    std::sort(by_phase_.begin(), by_phase_.end(), [this](auto a, auto b) { return job_.phases[a] < job_.phases[b]; });
    for (size_t at = 0; at < by_phase_.size(); ++at) position_[by_phase_[at]] = at;
    streams_.reserve(head_.streams);
    double cycles = std::max(0.0, head_.end_s - head_.measured_from_s) / head_.period_s + 1;
    latency_s_.reserve(std::min<uint64_t>(head_.streams * static_cast<uint64_t>(cycles), kMaxReserved));
    late_s_.reserve(latency_s_.capacity());
  }

  void run() {
    polling::sleep_until(head_.start_s);
    bool is_measured = false;
    for (double now; (now = now_s()) < head_.end_s;) {
      if (!is_measured && now >= head_.measured_from_s) {
        is_measured = true;
        cpu_s_ = used_s();
      }
      for (; streams_.size() < head_.streams && now >= next_open_s(); connections_.flush()) open_next();
      if (now >= next_send_s()) send_due(now);
      connections_.poll(std::min({next_send_s(), next_open_s(), head_.end_s, now + polling::kMaxWaitS}));
    }
    cpu_s_ = used_s() - cpu_s_;
    send_due(now_s());
    due_is_over_ = true;
    double given_up_s = now_s() + head_.stragglers_s;
    while (waiting_ > 0 && now_s() < given_up_s) connections_.poll(now_s() + polling::kMaxWaitS);
  }

  void write_outcome() const {
    std::string line = "{\"broken\":{";
    for (const auto& [reason, count] : broken_)
      line += (line.back() == '{' ? "" : ",") + frames::json_string(reason) + ":" + std::to_string(count);
    line += "},\"kept\":[";
    for (const Stream& stream : streams_) {
      if (!is_kept(stream)) continue;
      if (line.back() != '[') line += ",";
      line += "[" + std::to_string(stream.index) + "," + std::to_string(stream.next_result) + "," +
              std::to_string(stream.kept.size()) + "]";
    }
    const std::pair<const char*, uint64_t> counts[] = {
        {"offered", offered_}, {"repeated", repeated_},           {"opened", opened_},  {"refused", refused_},
        {"held", held_},       {"latencies", latency_s_.size()}, {"lateness", late_s_.size()},
    };
    line += "]";
    for (const auto& [name, count] : counts) line += std::string(",\"") + name + "\":" + std::to_string(count);
    line += ",\"cpu_s\":" + std::to_string(cpu_s_) + "}\n";
    fwrite(line.data(), 1, line.size(), stdout);
    fwrite(latency_s_.data(), sizeof(double), latency_s_.size(), stdout);
    fwrite(late_s_.data(), sizeof(double), late_s_.size(), stdout);
    for (const Stream& stream : streams_) fwrite(stream.kept.data(), 1, stream.kept.size(), stdout);
    if (fflush(stdout) != 0) fail("the outcome cannot be written");
  }

 private:
  static double used_s() {
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    auto us = [](const timeval& time) { return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_usec); };
    return (us(used.ru_utime) + us(used.ru_stime)) / 1e6;
  }

  bool is_shared() const { return head_.per_connection > 0; }

  bool is_kept(const Stream& stream) const { return head_.frame_bytes > 0 && stream.index % head_.check_every == 0; }

  // ---- the schedule: every stream has one chunk in each cycle, at its phase

  double due_s(uint64_t cycle, uint64_t index) const {
    return head_.start_s + static_cast<double>(cycle) * head_.period_s + job_.phases[index];
  }

  double next_due_s() const {
    return due_is_over_ ? INFINITY : due_s(cycle_, by_phase_[place_]);
  }

  double next_send_s() const { return std::max(next_due_s(), last_send_s_ + kGatherS); }

  double next_open_s() const {
    if (streams_.size() == head_.streams) return INFINITY;
    return head_.start_s + static_cast<double>(streams_.size()) * head_.open_s / static_cast<double>(head_.streams);
  }

  void send_due(double now) {
    last_send_s_ = now;
    for (double due; (due = next_due_s()) <= now && due < head_.end_s;) {
      uint64_t index = by_phase_[place_];
      if (index < streams_.size()) chunk_is_due(streams_[index], due, now);
      if (++place_ == by_phase_.size()) {
        place_ = 0;
        ++cycle_;
      }
    }
    connections_.flush();
  }

  void chunk_is_due(Stream& stream, double due, double now) {
    if (stream.state != Stream::kLive || cycle_ < stream.first_cycle || stream.due == head_.chunks) return;
    ++stream.due;
    if (due >= head_.measured_from_s) {
      ++offered_;
      ++stream.waiting;
      ++waiting_;
      late_s_.push_back(now - due);
      held_ += stream.sent - stream.confirmed >= stream.window;
    }
    send_allowed(stream);
  }

  // Sends what is due, as far as the stream's window allows.
  void send_allowed(Stream& stream) {
    for (; stream.sent < stream.due && stream.sent - stream.confirmed < stream.window; ++stream.sent) {
      message_.clear();
      frames::append_u32(message_, static_cast<uint32_t>(stream.sent));
      size_t chunk = stream.index % head_.sounds * head_.chunks + stream.sent;
      message_.append(job_.samples, chunk * head_.chunk_bytes, head_.chunk_bytes);
      connections_.send(*stream.connection, id_of(stream), frames::kBinary, message_);
    }
  }

  void open_next() {
    uint64_t index = streams_.size();
    bool needs_connection = !is_shared() || index % head_.per_connection == 0;
    Connection& connection = needs_connection ? connections_.open() : connections_.newest();
    if (needs_connection) connection.first = index;
    ++connection.streams;
    ++connection.open_streams;
    Stream stream{};
    stream.connection = &connection;
    stream.index = index;
    stream.answered.resize(head_.chunks);
    streams_.push_back(std::move(stream));
    if (connection.state == Connection::kLost) {
      end(streams_.back(), connection.lost_reason);
    } else if (is_shared()) {
      connections_.send(connection, id_of(streams_.back()), frames::kText, job_.start);
    }
  }

  uint32_t id_of(const Stream& stream) const { return static_cast<uint32_t>(stream.index - stream.connection->first); }

  // Ends a stream early; the last one of a connection closes it.
  void end(Stream& stream, const std::string& reason) {
    if (stream.state == Stream::kEnded) return;
    stream.state = Stream::kEnded;
    ++broken_[reason];
    waiting_ -= stream.waiting;
    Connection& connection = *stream.connection;
    bool is_last = !is_shared() || connection.streams == head_.per_connection || streams_.size() == head_.streams;
    if (--connection.open_streams == 0 && is_last) connections_.lose(connection, reason);
  }

  // ---- what the server sends

  void opened(Connection& connection) override {
    if (!is_shared()) connections_.send(connection, 0, frames::kText, job_.start);
  }

  void refused(Connection&) override { refused_ += !is_shared(); }

  void lost(Connection& connection, const std::string& reason) override {
    for (size_t id = 0; id < connection.streams; ++id) end(streams_[connection.first + id], reason);
  }

  void after_event() override {
    // A poll may bring many events: chunks that are due meanwhile would go out in a burst.
    double now = now_s();
    if (now >= next_send_s()) send_due(now);
  }

  void message(Connection& connection, uint32_t id, uint32_t kind, std::string_view payload, double now) override {
    if (id >= connection.streams) return;
    Stream& stream = streams_[connection.first + id];
    if (stream.state == Stream::kEnded) return;
    if (kind == frames::kClose) {
      // Only a shared connection has entries of this kind.
      bool is_refusal = stream.state == Stream::kOpening;
      refused_ += is_refusal;
      end(stream, is_refusal ? frames::shortened(payload.substr(std::min<size_t>(2, payload.size())))
                             : frames::close_text(payload));
    } else if (kind == frames::kBinary && stream.state == Stream::kLive) {
      take_result(stream, payload, now);
    } else if (kind == frames::kText && stream.state == Stream::kOpening &&
               frames::json_field(payload, "type") == "\"ready\"") {
      begin(stream, payload, now);
    } else {
      std::string said = kind == frames::kText ? std::string(payload.substr(0, kMaxShown))
                                               : "a message of " + std::to_string(payload.size()) + " bytes";
      fail("the server sent " + said + " where it should not; is this a Penstock server?");
    }
  }

  void begin(Stream& stream, std::string_view ready, double now) {
    double window = frames::json_number(ready, "window"), chunk_ms = frames::json_number(ready, "chunk_ms");
    if (!(window >= 1 && window <= 1e9 && chunk_ms > 0))
      fail("the server gives no window: " + std::string(ready.substr(0, kMaxShown)));
    // As many unanswered messages, or a second of the signal if that is longer.
    stream.window = static_cast<uint64_t>(std::max(window, std::min(1e3 / chunk_ms, 1e9)));
    stream.state = Stream::kLive;
    // The first chunk is due at the next time of the schedule that is not past.
    stream.first_cycle = cycle_ + (position_[stream.index] < place_);
    while (due_s(stream.first_cycle, stream.index) < now) ++stream.first_cycle;
    ++opened_;
  }

  void take_result(Stream& stream, std::string_view payload, double now) {
    if (payload.size() < kResultHead)
      fail("the server sent a result of " + std::to_string(payload.size()) + " bytes; its head alone has 8");
    uint64_t number = frames::read_u32(payload.data()), count = frames::read_u32(payload.data() + 4);
    payload.remove_prefix(kResultHead);
    if (head_.frame_bytes > 0 && count * head_.frame_bytes != payload.size())
      fail("the server sent a result of " + std::to_string(count) + " frames in " + std::to_string(payload.size()) +
           " bytes; a frame has " + std::to_string(head_.frame_bytes));
    repeated_ += number != stream.next_result;
    stream.next_result = number + 1;
    if (number < stream.sent && !stream.answered[number]) {
      stream.answered[number] = true;
      double due = due_s(stream.first_cycle + number, stream.index);
      if (due >= head_.measured_from_s) {
        latency_s_.push_back(now - due);
        --stream.waiting;
        --waiting_;
      }
    }
    // One that is too long is found as well from its first frames beyond the end.
    if (is_kept(stream) && stream.kept.size() <= head_.output_bytes) stream.kept += payload;
    // A result confirms every message up to its own.
    stream.confirmed = std::max(stream.confirmed, std::min(number + 1, stream.sent));
    send_allowed(stream);
  }

  const Job job_;
  const Head& head_ = job_.head;
  // Streams by phase, and the place of each.
  std::vector<uint64_t> by_phase_, position_;
  uint64_t cycle_ = 0, place_ = 0;
  bool due_is_over_ = false;
  double last_send_s_ = 0, cpu_s_ = 0;
  std::vector<Stream> streams_;
  std::vector<double> latency_s_, late_s_;
  uint64_t offered_ = 0, repeated_ = 0, opened_ = 0, refused_ = 0, held_ = 0, waiting_ = 0;
  std::map<std::string, uint64_t> broken_;
  std::string message_;
  connections::Connections connections_;
};

std::string read_text() {
  uint64_t length;
  read_all(&length, sizeof length);
  if (length > kMaxBytes) fail("the job has a text that is too long");
  std::string text(length, 0);
  read_all(text.data(), length);
  return text;
}

Job read_job() {
  Job job;
  read_all(&job.head, sizeof job.head);
  const Head& head = job.head;
  bool is_right = head.streams > 0 && head.streams <= kMaxStreams && head.period_s > 0 && head.check_every > 0 &&
                  head.sounds > 0 && head.sounds <= kMaxStreams && head.chunk_bytes > 0 &&
                  head.chunk_bytes <= kMaxChunk && head.chunks > 0 &&
                  head.chunks <= kMaxBytes / head.sounds / head.chunk_bytes;
  if (!is_right) fail("the job has no streams, no chunks or too many");
  job.upgrade = read_text();
  job.start = read_text();
  job.phases.resize(head.streams);
  read_all(job.phases.data(), job.phases.size() * sizeof(double));
  job.samples.resize(head.sounds * head.chunks * head.chunk_bytes);
  read_all(job.samples.data(), job.samples.size());
  return job;
}

}  // namespace

int main() {
  signal(SIGPIPE, SIG_IGN);
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  StreamSender sender(read_job());
  sender.run();
  sender.write_outcome();
}
