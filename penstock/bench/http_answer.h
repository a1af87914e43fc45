// The head of an HTTP answer, as the compiled senders read it.

#pragma once

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <algorithm>
#include <string>

#include "polling.h"

namespace http_answer {

// Bytes of the head at the beginning of the data; 0 if it is not whole.
inline size_t head_size(const char* data, size_t count) {
  const char* end = static_cast<const char*>(memmem(data, count, "\r\n\r\n", 4));
  return end == nullptr ? 0 : static_cast<size_t>(end - data) + 4;
}

inline size_t content_length(const char* data, size_t head) {
  static constexpr char kName[] = "content-length:";
  for (const char* line = data; line < data + head;) {
    const char* end = static_cast<const char*>(memchr(line, '\n', static_cast<size_t>(data + head - line)));
    if (strncasecmp(line, kName, sizeof kName - 1) == 0) return strtoull(line + sizeof kName - 1, nullptr, 10);
    line = end + 1;
  }
  polling::fail("an answer has no Content-Length: " + std::string(data, std::min<size_t>(head, 200)));
}

inline bool closes(const char* data, size_t head) { return memmem(data, head, "Connection: close", 17) != nullptr; }

inline int status(const char* data) { return atoi(data + 9); }

}  // namespace http_answer
