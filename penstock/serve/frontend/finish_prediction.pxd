# C types of finish_prediction.py, by which Cython compiles it (decision 082).

from penstock.serve.table.costs cimport Costs


cdef class FinishPrediction:
    cdef public bint stalled
    cdef public object _table, _grid, _length_costs, _generation_costs
    cdef public Costs _costs
    cdef public list _held, _held_lengths
    cdef public long long[::1] _handling_ns, _cost_rows, _cost_ns
    cdef public long long[::1] _min_compute_ns, _other_tables_ns, _other_tables_share
    cdef public long long _budget_ns, _spare_ns, _margin_ns, sure_ns, sure_rows, shortest_length
    cdef public double _stretch
    cdef public object shortest_lengths
    cdef public dict _own_ns

    cpdef long long rows_ahead(self, bint low_priority)
