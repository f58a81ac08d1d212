"""Compiles the index table and the disk tier's reads. Without a compiler the package is the same, only slower; see
`kv_prefix.index_table` and `kv_prefix.tiers.cell_io`."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kv_prefix._bit_table",
            ["src/kv_prefix/_bit_table.c"],
            depends=["src/kv_prefix/_bit_entries.h", "src/kv_prefix/_bit_sets.h"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "kv_prefix._cell_io",
            ["src/kv_prefix/_cell_io.c"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
