// WebSocket connections of one stream each, or of several: upgrades, frames, entries, partial reads and writes.

#pragma once

#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "polling.h"
#include "streams/frames.h"

namespace connections {

using polling::now_s;

// What a server takes in one message at any time.
constexpr size_t kMaxMessage = 1 << 16;
constexpr size_t kMaxUpgrade = 1 << 16;
constexpr std::string_view kSwitching = "HTTP/1.1 101 ", kHeadEnd = "\r\n\r\n";

struct Connection {
  enum State { kConnecting, kUpgrading, kOpen, kLost };
  int socket = -1;
  State state = kConnecting;
  // Index of its first stream, how many were opened on it, and how many of them have not ended.
  size_t first = 0, streams = 0, open_streams = 0;
  // Entries of the next message; frames that are not sent, from `sent` on.
  std::string entries, unsent;
  size_t sent = 0;
  bool is_dirty = false, waits_to_write = true;
  std::string buffer, lost_reason;
};

// The user of connections.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // The upgrade was answered: messages may be sent.
  virtual void opened(Connection& connection) = 0;
  // The upgrade was refused; `lost` follows.
  virtual void refused(Connection& connection) = 0;
  // A message came, on a shared connection for the stream of an id, which may not exist.
  virtual void message(Connection& connection, uint32_t id, uint32_t kind, std::string_view payload, double now) = 0;
  virtual void lost(Connection& connection, const std::string& reason) = 0;
  // The events of one connection were handled; those of others may wait.
  virtual void after_event() = 0;
};

class Connections {
 public:
  Connections(const polling::Server& server, std::string upgrade, bool is_shared, Receiver& receiver)
      : server_(server), upgrade_(std::move(upgrade)), is_shared_(is_shared), receiver_(receiver) {
    scratch_.resize(polling::kReadBytes);
  }

  Connection& open() {
    all_.push_back(std::make_unique<Connection>());
    Connection& connection = *all_.back();
    connection.socket = server_.connect();
    poll_.add(connection.socket, EPOLLOUT, &connection);
    return connection;
  }

  Connection& newest() { return *all_.back(); }

  // Waits until events or a time, handles them, and sends what is to be sent.
  void poll(double until_s) {
    poll_.wait(until_s, [this](void* owner, uint32_t events) {
      Connection& connection = *static_cast<Connection*>(owner);
      if (connection.state != Connection::kLost) handle(connection, events);
      receiver_.after_event();
    });
    flush();
  }

  // Puts a message into the frames that go out at the next flush.
  void send(Connection& connection, uint32_t id, uint8_t kind, std::string_view payload) {
    if (!is_shared_) {
      frames::append_frame(connection.unsent, kind, payload, mask());
    } else {
      std::string& entries = connection.entries;
      if (!entries.empty() && entries.size() + frames::kEntryHead + payload.size() > kMaxMessage) seal(connection);
      frames::append_u32(entries, id);
      frames::append_u32(entries, kind);
      frames::append_u32(entries, static_cast<uint32_t>(payload.size()));
      entries += payload;
    }
    make_dirty(connection);
  }

  // Sends what the streams of each connection have, in one call.
  void flush() {
    for (size_t at = 0; at < dirty_.size(); ++at) {
      Connection& connection = *dirty_[at];
      connection.is_dirty = false;
      if (connection.state != Connection::kOpen) continue;
      seal(connection);
      if (!connection.waits_to_write) write(connection);
    }
    dirty_.clear();
  }

  void lose(Connection& connection, const std::string& reason) {
    if (connection.state == Connection::kLost) return;
    connection.state = Connection::kLost;
    connection.lost_reason = reason;
    close(connection.socket);
    connection.entries = connection.unsent = std::string();
    receiver_.lost(connection, reason);
  }

 private:
  uint32_t mask() { return static_cast<uint32_t>(random_()); }

  void make_dirty(Connection& connection) {
    if (!connection.is_dirty) dirty_.push_back(&connection);
    connection.is_dirty = true;
  }

  void seal(Connection& connection) {
    if (connection.entries.empty()) return;
    frames::append_frame(connection.unsent, frames::kBinary, connection.entries, mask());
    connection.entries.clear();
  }

  void write(Connection& connection) {
    std::string& unsent = connection.unsent;
    size_t left = unsent.size() - connection.sent;
    ssize_t count = left == 0 ? 0 : ::send(connection.socket, unsent.data() + connection.sent, left, MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN && errno != EINTR) {
      lose(connection, strerror(errno));
      return;
    }
    connection.sent += static_cast<size_t>(std::max<ssize_t>(count, 0));
    if (connection.sent == unsent.size() || connection.sent > kMaxMessage) {
      unsent.erase(0, connection.sent);
      connection.sent = 0;
    }
    bool waits = !unsent.empty();
    if (waits != connection.waits_to_write)
      poll_.change(connection.socket, waits ? EPOLLIN | EPOLLOUT : EPOLLIN, &connection);
    connection.waits_to_write = waits;
  }

  void handle(Connection& connection, uint32_t events) {
    if (connection.state == Connection::kConnecting) {
      if (int reason = polling::connect_error(connection.socket)) {
        lose(connection, strerror(reason));
        return;
      }
      connection.state = Connection::kUpgrading;
      connection.unsent = upgrade_;
      write(connection);
      return;
    }
    // First: a server may answer and close before it has read everything.
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
      ssize_t count = recv(connection.socket, scratch_.data(), scratch_.size(), 0);
      if (count > 0) {
        receive(connection, static_cast<size_t>(count));
      } else if (count == 0) {
        lose(connection, "the server closed the connection");
      } else if (errno != EAGAIN && errno != EINTR) {
        lose(connection, strerror(errno));
      }
    }
    if (connection.state != Connection::kLost && events & EPOLLOUT) write(connection);
  }

  void receive(Connection& connection, size_t count) {
    double now = now_s();
    // Joined outside the connection, because one that is lost on the way forgets what it has.
    std::string joined;
    std::string_view data(scratch_.data(), count);
    if (!connection.buffer.empty()) {
      joined.swap(connection.buffer);
      data = joined.append(data);
    }
    if (connection.state == Connection::kUpgrading) data.remove_prefix(upgrade(connection, data));
    while (connection.state == Connection::kOpen) {
      frames::Found found = frames::next_frame(data);
      if (found.wrong != nullptr) {
        lose(connection, found.wrong);
      } else if (found.size == 0) {
        break;
      } else {
        data.remove_prefix(found.size);
        take_frame(connection, found, now);
      }
    }
    if (connection.state != Connection::kLost) connection.buffer.assign(data);
  }

  // Where frames begin, if the answer to the upgrade is whole.
  size_t upgrade(Connection& connection, std::string_view data) {
    size_t end = data.find(kHeadEnd);
    if (end == data.npos) {
      if (data.size() > kMaxUpgrade) lose(connection, "the server answers the upgrade with a head of more than 64 KiB");
      return 0;
    }
    if (data.substr(0, kSwitching.size()) != kSwitching) {
      receiver_.refused(connection);
      lose(connection, refusal(data.substr(0, data.find("\r\n")), data.substr(end)));
      return 0;
    }
    connection.state = Connection::kOpen;
    make_dirty(connection);
    receiver_.opened(connection);
    return end + kHeadEnd.size();
  }

  // The status, and the server's reason as far as it has come.
  static std::string refusal(std::string_view line, std::string_view body) {
    // Beyond the version of HTTP.
    std::string said(line.substr(std::min<size_t>(9, line.size())));
    std::string_view reason = frames::json_field(body, "error");
    if (reason.size() > 2) said += ": " + std::string(reason.substr(1, reason.size() - 2));
    return frames::shortened(said);
  }

  void take_frame(Connection& connection, const frames::Found& frame, double now) {
    if (frame.opcode == frames::kClose) {
      lose(connection, frames::close_text(frame.payload));
    } else if (frame.opcode == frames::kPing) {
      if (connection.unsent.size() > kMaxMessage) return;
      frames::append_frame(connection.unsent, frames::kPong, frame.payload, mask());
      make_dirty(connection);
    } else if (frame.opcode == frames::kPong) {
      return;
    } else if (!is_shared_) {
      receiver_.message(connection, 0, frame.opcode, frame.payload, now);
    } else if (frame.opcode == frames::kBinary) {
      take_entries(connection, frame.payload, now);
    } else {
      lose(connection, "the server sent text on a shared connection");
    }
  }

  void take_entries(Connection& connection, std::string_view entries, double now) {
    while (!entries.empty() && connection.state == Connection::kOpen) {
      bool is_whole = entries.size() >= frames::kEntryHead;
      size_t size = is_whole ? frames::read_u32(entries.data() + 8) : 0;
      if (!is_whole || entries.size() - frames::kEntryHead < size) {
        lose(connection, "the server sent an entry that is cut off");
        return;
      }
      uint32_t id = frames::read_u32(entries.data()), kind = frames::read_u32(entries.data() + 4);
      std::string_view payload = entries.substr(frames::kEntryHead, size);
      entries.remove_prefix(frames::kEntryHead + size);
      receiver_.message(connection, id, kind, payload, now);
    }
  }

  const polling::Server server_;
  const std::string upgrade_;
  const bool is_shared_;
  Receiver& receiver_;
  polling::Poll poll_;
  std::mt19937 random_{std::random_device{}()};
  std::vector<std::unique_ptr<Connection>> all_;
  std::vector<Connection*> dirty_;
  std::vector<char> scratch_;
};

}  // namespace connections
