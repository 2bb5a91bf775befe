"""A client: gives an agent a task, and prints how it goes. URL of the agent, then the text; the token is in the environment."""

import asyncio
import os
import sys
import uuid

import httpx
from a2a.client import ClientConfig, create_client
from a2a.types import a2a_pb2 as pb


async def main(url: str, text: str) -> None:
    headers = {"authorization": f"Bearer {os.environ['TOKEN']}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        client = await create_client(url, ClientConfig(httpx_client=http))
        message = pb.Message(message_id=uuid.uuid4().hex, role=pb.ROLE_USER, parts=[pb.Part(text=text)])
        async for event in client.send_message(pb.SendMessageRequest(message=message)):
            if event.HasField("artifact_update"):
                artifact = event.artifact_update.artifact
                print(f"{artifact.name}: {artifact.parts[0].text}")
            elif event.HasField("status_update"):
                status = event.status_update.status
                told = " ".join(part.text for part in status.message.parts)
                print(f"{pb.TaskState.Name(status.state)} {told}".rstrip())


asyncio.run(main(sys.argv[1], sys.argv[2]))
