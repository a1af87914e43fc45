"""Speech as other makers' clients take it: their protocols without sockets, over one model of utterances."""
