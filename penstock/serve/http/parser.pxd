# C types of parser.py, by which Cython compiles it (decision 082).

import cython


cdef class KnownHead:
    cdef public object head
    cdef public bytes text
    cdef public long long length


cdef class HeadCache:
    cdef public dict _heads

    @cython.locals(known=KnownHead)
    cpdef KnownHead head(self, bytes data)


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
    cdef public long long _silent_bytes
    cdef public object _body_left  # a client may name any number
    cdef public long long _parts
    cdef public KnownHead _last
    cdef public object _parser

    @cython.locals(last=KnownHead)
    cpdef object known(self, bytes data)
