"""Triton Inference Server with its sequence batcher: writes a model repository and becomes the server, over gRPC."""

import argparse
from pathlib import Path

from benchmarks.peers.triton.server import HERE, become_triton, repository_of
from penstock.core.bundles.bundle import read_bundle

# A sequence that its client left behind is ended after so long.
IDLE_US = 10_000_000

CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {max_batch}
input {{ name: "{input}" data_type: TYPE_{input_datatype} dims: {input_dims} }}
output {{ name: "{output}" data_type: TYPE_{output_datatype} dims: {output_dims} }}
instance_group {{ kind: KIND_CPU count: 1 }}
sequence_batching {{
  max_sequence_idle_microseconds: {idle_us}
  {strategy}
}}
parameters {{ key: "bundle" value {{ string_value: "{bundle}" }} }}
parameters {{ key: "slots" value {{ string_value: "{slots}" }} }}
"""
STRATEGIES = {
    "oldest": "oldest {{ max_candidate_sequences: {candidates} max_queue_delay_microseconds: {wait_us}{preferred} }}",
    "direct": "direct {{ max_queue_delay_microseconds: {wait_us} minimum_slot_utilization: {share:g} }}",
}


def main() -> None:
    """Read the command line and become the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--strategy", choices=STRATEGIES, default="oldest")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--candidates", type=int, default=1024, help="sequences at once, of oldest")
    parser.add_argument("--preferred", type=int, default=0, help="the preferred batch, of oldest; 0 for none")
    parser.add_argument("--max-wait-ms", type=float, default=0.0)
    parser.add_argument("--least-share", type=float, default=0.0, help="of the slots, that end the wait; of direct")
    parser.add_argument("--pool", type=int, default=8, help="messages of gRPC that are kept to be used again")
    given = parser.parse_args()
    manifest = read_bundle(given.bundle).manifest
    strategy = STRATEGIES[given.strategy].format(
        candidates=given.candidates,
        wait_us=round(given.max_wait_ms * 1000),
        preferred=f" preferred_batch_size: [{given.preferred}]" if given.preferred else "",
        share=given.least_share,
    )
    config = CONFIG.format(
        name=manifest.name,
        max_batch=given.max_batch,
        input=manifest.input.name,
        input_datatype=manifest.input.protocol_datatype,
        input_dims=list(manifest.input.shape),
        output=manifest.output.name,
        output_datatype=manifest.output.protocol_datatype,
        # As many frames as come of a chunk.
        output_dims=[-1, *manifest.output.shape[1:]],
        idle_us=IDLE_US,
        strategy=strategy,
        bundle=given.bundle.resolve(),
        slots=max(given.candidates, given.max_batch),
    )
    become_triton(
        repository_of(manifest.name, config, HERE / "sequence_model.py"),
        "--grpc-address=127.0.0.1",
        f"--grpc-port={given.port}",
        f"--grpc-infer-allocation-pool-size={given.pool}",
        "--allow-http=false",
    )


if __name__ == "__main__":
    main()
