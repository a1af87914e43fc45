// Frames of a WebSocket client (RFC 6455), the entries of shared connections, and the JSON that a sender needs.

#pragma once

#include <endian.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <string_view>

namespace frames {

constexpr uint8_t kText = 1, kBinary = 2, kClose = 8, kPing = 9, kPong = 10;
constexpr size_t kMaxControl = 125;
constexpr size_t kMaxReason = 200;
constexpr size_t kMaxServerFrame = 1 << 26;
constexpr size_t kEntryHead = 12;

inline uint32_t read_u32(const char* from) {
  uint32_t value;
  memcpy(&value, from, sizeof value);
  return le32toh(value);
}

inline void append_u32(std::string& to, uint32_t value) {
  value = htole32(value);
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Appends a frame whose payload is masked with a key of its own.
inline void append_frame(std::string& to, uint8_t opcode, std::string_view payload, uint32_t mask) {
  to.push_back(static_cast<char>(0x80 | opcode));
  if (payload.size() < 126) {
    to.push_back(static_cast<char>(0x80 | payload.size()));
  } else if (payload.size() < 1 << 16) {
    uint16_t size = htobe16(static_cast<uint16_t>(payload.size()));
    to.push_back(static_cast<char>(0x80 | 126));
    to.append(reinterpret_cast<const char*>(&size), sizeof size);
  } else {
    uint64_t size = htobe64(payload.size());
    to.push_back(static_cast<char>(0x80 | 127));
    to.append(reinterpret_cast<const char*>(&size), sizeof size);
  }
  to.append(reinterpret_cast<const char*>(&mask), sizeof mask);
  size_t at = to.size();
  to.append(payload);
  char* bytes = to.data() + at;
  uint64_t wide = static_cast<uint64_t>(mask) << 32 | mask, block;
  size_t done = 0;
  for (; done + sizeof block <= payload.size(); done += sizeof block) {
    memcpy(&block, bytes + done, sizeof block);
    block ^= wide;
    memcpy(bytes + done, &block, sizeof block);
  }
  for (; done < payload.size(); ++done) bytes[done] ^= reinterpret_cast<const char*>(&mask)[done % sizeof mask];
}

// A frame of the server, if it has come whole; otherwise what is wrong, or neither.
struct Found {
  uint8_t opcode = 0;
  size_t size = 0;  // of the whole frame; 0 until it has come
  std::string_view payload;
  const char* wrong = nullptr;
};

inline Found next_frame(std::string_view bytes) {
  Found found;
  const char* data = bytes.data();
  size_t count = bytes.size();
  if (count < 2) return found;
  uint8_t first = static_cast<uint8_t>(data[0]), second = static_cast<uint8_t>(data[1]);
  found.opcode = first & 15;
  if ((first & 0xF0) != 0x80) found.wrong = "the server sent a fragment or an extension";
  if (second & 0x80) found.wrong = "the server sent a masked frame";
  bool control = found.opcode >= kClose;
  if (control ? found.opcode > kPong || second > kMaxControl : found.opcode != kText && found.opcode != kBinary)
    found.wrong = "the server sent a frame that RFC 6455 does not allow";
  if (found.wrong != nullptr) return found;
  size_t head = 2;
  uint64_t size = second;
  if (second == 126) {
    uint16_t given;
    head += sizeof given;
    if (count < head) return found;
    memcpy(&given, data + 2, sizeof given);
    size = be16toh(given);
  } else if (second == 127) {
    head += sizeof size;
    if (count < head) return found;
    memcpy(&size, data + 2, sizeof size);
    size = be64toh(size);
  }
  if (size > kMaxServerFrame) {
    found.wrong = "the server sent a frame of more than 64 MiB";
  } else if (count - head >= size) {
    found.size = head + size;
    found.payload = {data + head, static_cast<size_t>(size)};
  }
  return found;
}

// A reason of the server as it is reported.
inline std::string shortened(std::string_view reason) { return std::string(reason.substr(0, kMaxReason)); }

// Code and reason of a close.
inline std::string close_text(std::string_view payload) {
  if (payload.size() < 2) return "the server closed without a code";
  unsigned code = static_cast<unsigned>(static_cast<uint8_t>(payload[0])) << 8 | static_cast<uint8_t>(payload[1]);
  return std::to_string(code) + " " + shortened(payload.substr(2));
}

// The value of a field of a flat JSON object, as it is written; empty if it is not there.
inline std::string_view json_field(std::string_view text, const std::string& name) {
  constexpr std::string_view kSpace = " \t\r\n";
  size_t at = text.find("\"" + name + "\"");
  if (at == text.npos) return {};
  at = text.find_first_not_of(kSpace, at + name.size() + 2);
  if (at == text.npos || text[at] != ':') return {};
  at = text.find_first_not_of(kSpace, at + 1);
  if (at == text.npos) return {};
  size_t end = text[at] == '"' ? text.find('"', at + 1) : text.find_first_of(",}] \t\r\n", at);
  if (end == text.npos) return {};
  return text.substr(at, end - at + (text[at] == '"'));
}

// A number of a flat JSON object; 0 if it is not there.
inline double json_number(std::string_view text, const std::string& name) {
  return strtod(std::string(json_field(text, name)).c_str(), nullptr);
}

inline std::string json_string(std::string_view text) {
  std::string written = "\"";
  for (char each : text) {
    if (each == '"' || each == '\\') written.push_back('\\');
    // Bytes that are no UTF-8 are replaced where it is read.
    written.push_back(static_cast<uint8_t>(each) < ' ' ? ' ' : each);
  }
  return written + '"';
}

}  // namespace frames
