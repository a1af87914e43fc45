# C types of session.py, by which Cython compiles it (decision 082).

import cython

from penstock.serve.streams.actions cimport PushChunk


cdef class Session:
    cdef public object state, idle_s
    cdef public long long max_message_bytes
    cdef public object _rules, _tickets, _asked, _application, _live, _input, _name, _stream, _latency_ms
    cdef public object _decoder, _next_decoder, _held, _events, _find_segments, _log, _hot_words
    cdef public long long _chunk_frames, _frame_bytes, _output_size, _segments, _under_way
    cdef public long long _next, _answered, _without_samples
    cdef public bint _is_float32, _check_samples, _binary
    cdef public object _chunks_left, _flushes, _close
    cdef public list _parts

    cpdef object _result(self, object output, bint last)
