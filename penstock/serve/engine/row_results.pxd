# C types of row_results.py, by which Cython compiles it (decision 082).

import cython


cdef class RowResults:
    cdef public long long[::1] _arrival_ns, _deadline_ns, _output_length, _status, _queue_ns, _compute_ns
    cdef public long long[::1] _produced, _consumed, _done, _done_count
    cdef public long long[::1] _batch_counts, _compute_counts, _queue_counts, _latency_counts, _sums, _outcomes
    cdef public long long[::1] _time_edges_ns, _batch_edges
    cdef public long long _row_size, _cancelled_ns, _not_finite

    @cython.locals(compute_ns=cython.longlong, rows=cython.longlong, queue_sum=cython.longlong, late=cython.longlong,
                   row=cython.longlong, entry=cython.longlong, to=cython.longlong, queue_ns=cython.longlong,
                   deadline_ns=cython.longlong)
    cpdef object write(self, long long[:] from_B, long long[:] to_B, long long[:] status_B, long long start_ns,
                       long long end_ns)
    @cython.locals(row=cython.longlong, at=cython.longlong)
    cpdef object check_finite(self, const float[:, :] output_BN, long long[:] status_B)
    @cython.locals(row=cython.longlong, count=cython.longlong)
    cpdef long long list_done(self, long long[:] rows_B)
    @cython.locals(row=cython.longlong, slot=cython.longlong)
    cpdef object produce(self, long long[:] rows_B, long long[:] consumed_B)


@cython.locals(first=cython.longlong, last=cython.longlong, middle=cython.longlong)
cdef long long bin_of(long long[::1] edges, long long value)
