"""The Hugging Face hub as a local folder, with a listing, downloads, and commits."""

import shutil
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
from huggingface_hub.errors import RepositoryNotFoundError

from fullstride.nets.weights import hub


def refusal(kind: type[Exception], status: int, message: str = "") -> Exception:
    """An error of the hub's client for an answer of the server."""
    response = SimpleNamespace(
        status_code=status, headers={}, request=None, reason_phrase=HTTPStatus(status).phrase
    )
    return kind(f"{status}\n\n{message}", response=response, server_message=message or None)


class LocalHub:
    """A folder USER/NAME for each repository; `error` is what every request raises."""

    def __init__(self, monkeypatch, folder: Path):
        self.root, self.cache = folder / "hub", folder / "cache"
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.requests: list[str] = []
        self.error: Exception | None = None
        self.library: str | None = None
        for name in ("hf_hub_download", "try_to_load_from_cache"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, name))
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
        monkeypatch.setattr(hub, "is_offline", lambda: False)

    def files(self, repository: str) -> list[Path]:
        return sorted(each for each in (self.root / repository).rglob("*") if each.is_file())

    def model_info(self, repository: str, *, revision=None, files_metadata=False):
        self.requests.append(f"listing of {repository} {revision or ''}".strip())
        if self.error:
            raise self.error
        folder = self.root / repository
        if not folder.is_dir():
            raise refusal(RepositoryNotFoundError, 404)
        siblings = [
            SimpleNamespace(
                rfilename=each.relative_to(folder).as_posix(),
                size=each.stat().st_size if files_metadata else None,
            )
            for each in self.files(repository)
        ]
        return SimpleNamespace(
            siblings=siblings,
            sha=f"commit{len(self.commits)}",
            private=self.private.get(repository, True),
            library_name=self.library,
        )

    def hf_hub_download(self, repository: str, file: str, *, revision: str | None) -> str:
        self.requests.append(f"{file} of {repository} {revision or ''}".strip())
        if self.error:
            raise self.error
        path = self.cache / repository / f"commit{len(self.commits)}" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.root / repository / file, path)
        return str(path)

    def try_to_load_from_cache(self, repository: str, file: str, *, revision=None):
        paths = sorted((self.cache / repository).glob(f"*/{file}"))
        return str(paths[-1]) if paths else None

    def create_repo(self, repository: str, *, private: bool) -> None:
        if self.error:
            raise self.error
        self.private[repository] = private
        (self.root / repository).mkdir(parents=True)
        (self.root / repository / ".gitattributes").write_text("")

    def create_commit(self, repository: str, operations, *, commit_message, parent_commit):
        assert parent_commit == f"commit{len(self.commits)}"
        for each in operations:
            path = self.root / repository / each.path_in_repo
            if isinstance(each, huggingface_hub.CommitOperationDelete):
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                content = each.path_or_fileobj
                path.write_bytes(
                    content if isinstance(content, bytes) else Path(content).read_bytes()
                )
        self.commits.append(commit_message)
        url = f"https://huggingface.co/{repository}/commit/{len(self.commits)}"
        return SimpleNamespace(commit_url=url)
