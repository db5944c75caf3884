"""LoRA in a federation: A matrices are shared, B matrices stay with the client, and the frozen base is never sent.

pip install "equipoise[lora]"
python examples/lora.py

Clients sort short texts by topic, and every client has swapped two of the labels: what the words mean is common
knowledge, how topics are called is personal. Nothing is downloaded: texts are generated, and the base model starts
from random weights and is trained on public texts first.
"""

import copy
import warnings

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import equipoise as eq

WORDS, TOPICS, LENGTH, CLIENTS = 60, 4, 12, 20
TEXTS = tuple[np.ndarray, np.ndarray]


class Logits(nn.Module):
    """Gives a model of transformers its input by keyword, and returns only the logits of its output."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x).logits


def texts(topic_of_word: np.ndarray, size: int, rng: np.random.Generator) -> TEXTS:
    """Generate texts and their topics; words of a text's own topic are four times as frequent as others."""
    frequency = np.where(topic_of_word == np.arange(TOPICS)[:, None], 4.0, 1.0)
    topics = rng.integers(TOPICS, size=size)
    chosen = [rng.choice(WORDS, size=LENGTH, p=frequency[t] / frequency[t].sum()) for t in topics]
    return np.stack(chosen), topics


def public_and_private(rng: np.random.Generator, size: int) -> tuple[TEXTS, list[TEXTS]]:
    """Generate public texts, and the clients' own: they use some words differently, and have labels swapped."""
    public = rng.permutation(np.arange(WORDS) % TOPICS)
    private = np.where(rng.random(WORDS) < 0.2, rng.integers(TOPICS, size=WORDS), public)
    clients = []
    for _ in range(CLIENTS):
        x, y = texts(private, size, rng)
        labels = np.arange(TOPICS)
        one, other = rng.choice(TOPICS, size=2, replace=False)
        labels[one], labels[other] = other, one
        clients.append((x, labels[y]))
    return texts(public, 25 * size, rng), clients


def pretrained(public: TEXTS, rounds: int) -> nn.Module:
    """Train a small transformer on public texts, in place of a download."""
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=TOPICS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",  # the other kinds cannot be batched over clients (mode="stacked")
    )
    torch.manual_seed(0)
    start = Logits(BertForSequenceClassification(config))
    central = eq.Local(lr=0.002, batch=30, optimizer="adam")  # a federation of one client is ordinary training
    return eq.train(start, [public], central, head=None, rounds=rounds, mode="threads").personal(0).model


def with_lora(base: nn.Module) -> nn.Module:
    """Freeze a copy of the base model, and add adapters to all its linear layers: W x becomes W x + 4 B A x."""
    torch.manual_seed(1)  # for the initial A; the initial B is zero
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    return Logits(get_peft_model(copy.deepcopy(base), config))


def main(rounds: int = 12, size: int = 60, seed: int = 0) -> dict[str, dict[str, float]]:
    """Compare what is shared, print a table, and return it.

    Args:
        rounds: number of rounds.
        size: number of texts of a client.
        seed: seed of the texts and of the runs.
    """
    public, clients = public_and_private(np.random.default_rng(seed), size)
    base = pretrained(public, rounds=4)
    whole, lora = Logits(copy.deepcopy(base)).requires_grad_(True), with_lora(base)
    settings = {"batch": 20, "optimizer": "adam"}
    methods = {
        "all parameters shared": (whole, eq.FedAvg(lr=0.002, **settings), None),
        "LoRA, A and B shared": (lora, eq.FedAvg(lr=0.01, **settings), None),
        "LoRA, A shared, B personal": (lora, eq.FedPer(lr=0.01, **settings), "*.lora_B.*"),
        "LoRA, nothing shared": (lora, eq.Local(lr=0.01, **settings), None),
    }
    table = {}
    print(f"The base model has {sum(p.numel() for p in base.parameters()):,} parameters; with LoRA they are frozen.")
    print(f"{'':28}{'accuracy':>10}{'kB a round':>12}{'kept by a client':>18}")
    for name, (module, algorithm, head) in methods.items():
        run = {"rounds": rounds, "evaluate_every": rounds, "split": (0.6, 0.0, 0.4), "seed": seed, "mode": "threads"}
        found = eq.train(module, clients, algorithm, head=head, **run).summary
        kind = "personal" if "personal" in found else "global"
        table[name] = {
            "accuracy": found[kind]["accuracy"],
            "bytes_a_round": found["bytes_a_round"],
            "parameters_shared": found["parameters_shared"],
            "parameters_personal": found["parameters_personal"],
        }
        row = table[name]
        kept = f"{row['parameters_personal']:,} numbers"
        print(f"{name:28}{row['accuracy']:10.3f}{row['bytes_a_round'] / 1e3:12,.0f}{kept:>18}", flush=True)
    return table


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, about its own names
    main()
