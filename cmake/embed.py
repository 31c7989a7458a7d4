#!/usr/bin/env python3
"""Writes an assembly file that embeds files with .incbin and a table of (name, begin, size) for base/embedded.cpp.

usage: embed.py SOURCE_DIR LIST OUT.S [WEB_DIST]

LIST holds one absolute path a line; a file's name is its path below SOURCE_DIR. Files of WEB_DIST get the prefix web/.
"""
import pathlib
import sys

source, listing, out = map(pathlib.Path, sys.argv[1:4])
files = [(str(pathlib.Path(p).relative_to(source)), p) for p in listing.read_text().split("\n") if p]
if len(sys.argv) > 4:
    dist = pathlib.Path(sys.argv[4])
    files += [("web/" + str(p.relative_to(dist)), str(p)) for p in sorted(dist.rglob("*")) if p.is_file()]
files.sort()
lines = ['.section .note.GNU-stack,"",@progbits', ".section .rodata"]
for i, (name, path) in enumerate(files):
    lines += [".balign 64", f"file_{i}_begin:", f'.incbin "{path}"', f"file_{i}_end:", ".byte 0",
              f'file_{i}_name: .asciz "{name}"']
lines += [".section .data.rel.ro,\"aw\"", ".balign 8", ".globl ddtree_embedded_table", "ddtree_embedded_table:"]
for i in range(len(files)):
    lines += [f".quad file_{i}_name, file_{i}_begin, file_{i}_end - file_{i}_begin"]
lines += [".quad 0, 0, 0", ""]
out.write_text("\n".join(lines))
