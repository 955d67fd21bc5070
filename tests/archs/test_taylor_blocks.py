"""The parts of MB-TaylorFormer: a block written out again, the kernels of the gate, compilation."""

import pytest
import torch
from torch.nn import functional as F

from archs.taylor_blocks import SKFF, Form, PatchEmbedding, TaylorBlock, head_groups

FORMS = {"v1": Form(0.5, 1e-6, None, "multiply"), "v2": Form(1.0, 1e-8, 8, "add")}
by_form = pytest.mark.parametrize("form", FORMS)


@torch.no_grad()
def pushed(net):
    for p in net.parameters():
        p.add_(torch.randn_like(p), alpha=0.1)
    return net.eval()


@pytest.mark.parametrize(
    ("heads", "groups"),
    [
        (1, [(3, 1)]),
        (2, [(3, 2)]),
        (4, [(3, 2), (5, 2)]),
        (8, [(3, 2), (5, 3), (7, 3)]),
    ],
)
def test_the_published_numbers_of_heads_have_the_published_kernels(heads, groups):
    assert head_groups(heads) == groups


@pytest.mark.parametrize("heads", [3, 5, 6, 7, 12, 16])
def test_other_numbers_of_heads_have_kernels_for_each(heads):
    groups = head_groups(heads)
    assert sum(count for _, count in groups) == heads
    assert [kernel for kernel, _ in groups] == [3, 5, 7][: len(groups)]
    assert all(count > 0 for _, count in groups)


def test_the_published_proportions_hold_for_twice_as_many_heads():
    assert head_groups(16) == [(3, 4), (5, 6), (7, 6)]


@by_form
def test_the_parts_compile_to_one_graph_forwards_and_backwards(form):
    torch._dynamo.reset()
    block = TaylorBlock(dim=12, heads=6, branches=0 if form == "v1" else 2, form=FORMS[form])
    embed, fuse = PatchEmbedding(12, clamp=(-3, 3)), SKFF(12, 2)

    def stage(x):
        y = embed(x)
        return fuse([block(y, 0), block(y, 0 if form == "v1" else 1)], x)

    parameters = [p for part in (block, embed, fuse) for p in part.parameters() if p.requires_grad]
    x = torch.rand(1, 12, 9, 7, requires_grad=True)
    upstream = torch.randn(1, 12, 9, 7)
    results = []
    for run in (torch.compile(stage, fullgraph=True, backend="aot_eager"), stage):
        out = run(x)
        results.append((out, *torch.autograd.grad(out, [x, *parameters], upstream)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@by_form
def test_a_block_is_what_the_paper_writes(form):
    """Written out again, of one branch, pixel by pixel."""
    block = TaylorBlock(dim=8, heads=2, branches=0 if form == "v1" else 1, form=FORMS[form])
    block = pushed(block).double()
    x = torch.rand(2, 8, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(block(x), _block_written_out(block, x, form), rtol=0, atol=1e-12)


def _block_written_out(block, x, form):
    p = dict(block.state_dict())
    b, c, h, w = x.shape
    heads, d, n = 2, c // 2, h * w

    def norm(x, weight):
        return x / (x.var(dim=1, keepdim=True, correction=0) + 1e-5).sqrt() * weight.reshape(1, -1, 1, 1)

    def depthwise(x, name):
        return F.conv2d(x, p[name], padding=1, groups=len(p[name]))

    y = norm(x, p["norm1.body.weight"])
    q, k, v = depthwise(F.conv2d(y, p["attn.qkv.weight"]), "attn.qkv_dwconv.weight").view(b, 3, heads, d, n).unbind(1)

    def unit(t, length, eps):
        return t / (t.norm(dim=2, keepdim=True) / length + eps)

    settings = (0.5, 1e-6) if form == "v1" else (1.0, 1e-8)
    terms = [(1, unit(q, *settings), unit(k, *settings))]
    gated = torch.cat([terms[0][1], terms[0][2]], dim=2) if form == "v1" else v
    if form == "v2":
        alpha = p["attn.scale"].sigmoid().view(heads, 1, 1)
        terms.append((alpha, unit(q.relu() ** 8, *settings), unit(k.relu() ** 8, *settings)))
    weight, bias = p["attn.refine_att.conv_list.0.weight"], p["attn.refine_att.conv_list.0.bias"]
    gate = F.conv2d(gated.reshape(b, -1, h, w), weight, bias, padding=1, groups=heads).sigmoid().view(b, heads, 1, n)
    pairs = 1 + sum(alpha * query.mT @ key for alpha, query, key in terms)  # (b, heads, n, n)
    o = (pairs @ v.mT / (pairs.sum(dim=-1, keepdim=True) + settings[1])).mT * p["attn.temperature"].view(heads, 1, 1)
    o = o * gate if form == "v1" else o + gate
    x = x + F.conv2d(o.reshape(b, c, h, w), p["attn.project_out.weight"])
    y = norm(x, p["norm2.body.weight"])
    if form == "v1":
        first, second = depthwise(F.conv2d(y, p["ffn.project_in.weight"]), "ffn.dwconv.weight").chunk(2, dim=1)
    else:
        first, second = (
            depthwise(F.conv2d(y, p[f"ffn.project_in_{i}.weight"]), f"ffn.dwconv_{i}.weight") for i in (1, 2)
        )
    return x + F.conv2d(F.gelu(first) * second, p["ffn.project_out.weight"])
