"""A server of S3 that the tests of a file share, and an empty bucket for each test."""

import boto3
import pytest
from moto.server import ThreadedMotoServer

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "key-of-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def server():
    """Return the address of a server."""
    threaded = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    threaded.start()
    host, port = threaded.get_host_and_port()
    yield f"http://{host}:{port}"
    threaded.stop()


@pytest.fixture
def bucket(server, tmp_path, monkeypatch, request):
    """Return a bucket that keeps all versions of its objects; the test works in an empty folder."""
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{abs(hash(request.node.name))}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    yield Bucket(client, name)
    s3fs.S3FileSystem.clear_instance_cache()


class Bucket:
    def __init__(self, client, name):
        self.client, self.name, self.url = client, name, f"s3://{name}/runs/7"

    def names(self):
        """Return the keys of the run."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix="runs/7/")
        return {each["Key"].removeprefix("runs/7/") for each in found.get("Contents", ())}

    def read(self, name):
        return self.client.get_object(Bucket=self.name, Key=f"runs/7/{name}")["Body"].read()

    def put(self, name, data):
        self.client.put_object(Bucket=self.name, Key=f"runs/7/{name}", Body=data)

    def uploads(self, name):
        """Return how often an object was uploaded."""
        found = self.client.list_object_versions(Bucket=self.name, Prefix=f"runs/7/{name}")
        return len(found.get("Versions", ()))
