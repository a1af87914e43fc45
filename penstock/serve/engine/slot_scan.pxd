# C types of slot_scan.py, by which Cython compiles it (decision 082).

import cython


cdef class SlotScan:
    cdef public long long[::1] _submitted, _taken, _consumed, _produced, _busy, _generation, _begun
    cdef public long long[::1] _deadline_ns, _flags, _length, _found
    cdef public object _found_rows
    cdef public long long _chunks, _first, _last

    @cython.locals(found=cython.longlong, slot=cython.longlong, waits=cython.bint)
    cpdef object ready(self)
    @cython.locals(least_ns=cython.longlong, row=cython.longlong, slot=cython.longlong, entry=cython.longlong,
                   deadline_ns=cython.longlong)
    cpdef long long least_deadline_ns(self, long long[:] rows_B)
    @cython.locals(row=cython.longlong, slot=cython.longlong, entry=cython.longlong, flags=cython.longlong,
                   fresh=cython.bint)
    cpdef object begin(self, long long[:] rows_B, long long[:] from_B, long long[:] busy_B, long long[:] length_B,
                       unsigned char[:] fresh_B, unsigned char[:] last_B)
