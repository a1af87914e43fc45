# C types of parser.py, by which Cython compiles it (decision 082).

import cython



cdef class HeadCache:
    cdef public dict _heads

    @cython.locals(data=bytes, known=tuple)
    cpdef object head(self, bytes data)


cdef class _Pending:
    cdef public object head
    cdef public object body
    cdef public long long max_body_bytes, head_bytes, count


cdef class RequestParser:
    cdef public object max_body_bytes
    cdef public HeadCache cache
    cdef public long long max_headers
    cdef public bint in_message, head_is_whole
    cdef public bytes unparsed
    cdef public bint expects_continue
    cdef public object rest
    cdef public _Pending _now
    cdef public list _complete
    cdef public object _rejection
    cdef public long long _silent_bytes, _body_left, _parts
    cdef public object _parser

    cpdef object known(self, bytes data)
