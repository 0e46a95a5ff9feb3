"""A plain gRPC client of pdserve: nothing of pdserve but the contract. Start a cluster first: `pdserve up`."""

import sys

import grpc

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc

ADDRESS = "127.0.0.1:50051"


def main() -> None:
    prompt = " ".join(sys.argv[1:]) or "What is 2+2?"
    request = pb.GenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content=prompt)]),
        stop=pb.StopConditions(max_tokens=64),
    )
    with grpc.insecure_channel(ADDRESS) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            for message in stub.Generate(request, timeout=120):
                for delta in message.deltas:
                    print(delta.text, end="", flush=True)
                if message.HasField("summary"):
                    timeline = message.summary.timeline
                    print(f"\nfirst token after {timeline.ttft_s:.3f} s, all after {timeline.e2el_s:.3f} s")
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")


if __name__ == "__main__":
    main()
