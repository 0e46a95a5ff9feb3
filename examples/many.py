"""The asyncio client: many prompts, a few at a time, each with two sampled answers. Start a cluster first: `pdserve up`."""

import asyncio

from pdserve.client import AsyncClient, Options, RetryPolicy

ADDRESS = "127.0.0.1:50051"
PROMPTS = [f"The capital of {country} is" for country in ("France", "Italy", "Spain", "Norway")]


async def main() -> None:
    options = Options(max_tokens=8, n=2, temperature=0.7, seed=1, stop=("\n",))
    async with AsyncClient(ADDRESS, retry=RetryPolicy(max_tries=8)) as client:
        answers = await client.complete_many(PROMPTS, options, concurrency=2)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for choice in answer.choices:
            print(f"{prompt}{choice.text}")


if __name__ == "__main__":
    asyncio.run(main())
