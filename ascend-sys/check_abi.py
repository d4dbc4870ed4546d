#!/usr/bin/env python3
"""Compares the declarations of this crate with the vendor's headers, by compiling both together.

    check_abi.py [--torch-npu 2.7.1] [--cann DIR]

The headers of the runtime and the collectives come from the torch-npu wheel on PyPI. No wheel contains the headers of the
operations: with --cann (or ASCEND_HOME_PATH) the script uses those of an installed toolkit; without it, the script only
searches the wheel's library for their names, and compares the shim's prototypes with the simulator's. Requires pip and g++.
On any mismatch, prints the compiler's messages and exits with status 1.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent

POINTERS = {"AclrtStream", "AclrtEvent", "AclrtContext", "AclmdlRI", "AclrtTaskGrp", "HcclComm"}
PLAIN = {
    "c_char": "char", "c_void": "void", "c_int": "int", "c_uint": "unsigned int", "i32": "int32_t", "u32": "uint32_t",
    "i64": "int64_t", "u64": "uint64_t", "usize": "size_t", "f32": "float", "()": "void",
    "AclrtUtilizationInfo": "aclrtUtilizationInfo", "HcclRootInfo": "HcclRootInfo", "DcmiHbmInfo": "struct dcmi_hbm_info",
}
# Simulator's parameter types: size in bytes, and 1 if passed in a floating-point register.
SIMULATED = {
    "Handle": (8, 0), "usize": (8, 0), "u64": (8, 0), "i64": (8, 0), "i32": (4, 0), "u32": (4, 0), "f64": (8, 1),
    "f32": (4, 1), "i8": (1, 0), "u8": (1, 0), "Bool": (1, 0), "Text": (8, 0),
}

PRELUDE = """
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
// Canonical form of a type: an enumeration becomes int, also as the target of a pointer.
template <class T, bool = std::is_enum_v<T>> struct canon { using type = T; };
template <class T> struct canon<T, true> { using type = int; };
template <class T> struct canon<T *, false> { using type = typename canon<T>::type *; };
template <class T> struct canon<const T, false> { using type = const typename canon<T>::type; };
template <class T> struct canon<const T, true> { using type = const int; };
template <class F> struct signature;
template <class R, class... A> struct signature<R (*)(A...)> {
    using type = std::tuple<std::conditional_t<std::is_void_v<R>, char, typename canon<R>::type> *, typename canon<A>::type...>;
};
template <class F, class G> constexpr bool same = std::is_same_v<typename signature<F>::type, typename signature<G>::type>;
// How a parameter is passed: its size, and whether it is a floating-point number.
template <size_t Bytes, bool Floating> struct travels {};
template <class F> struct travel;
template <class R, class... A> struct travel<R (*)(A...)> {
    using type = std::tuple<travels<sizeof(A), std::is_floating_point_v<A>>...>;
};
"""


def c_type(rust: str) -> str:
    rust = rust.strip()
    for start, end in (("*const ", " const *"), ("*mut ", " *")):
        if rust.startswith(start):
            return c_type(rust[len(start):]) + end
    return "void *" if rust in POINTERS else PLAIN[rust]


def declared_functions():
    """Yields (symbol, C++ function pointer type) for each function in symbols.rs."""
    text = (HERE / "src/ffi/symbols.rs").read_text()
    for symbol, arguments, result in re.findall(r'\w+: "(\w+)"\s*fn\(([^)]*)\)\s*->\s*([^,]+),', text):
        arguments = ", ".join(c_type(a) for a in arguments.split(",") if a.strip())
        yield symbol, f"{c_type(result)} (*)({arguments})"


def constants():
    """Yields (name, value) for each constant in abi.rs."""
    text = (HERE / "src/abi.rs").read_text()
    for name, value in re.findall(r"^    (\w+): \w+ = ([\d_]+);", text, re.M):
        yield name, int(value.replace("_", ""))


def shim_functions():
    """Yields (name, prototype) for each entry of the shim's table that has a prototype."""
    text = (HERE / "shim/functions.h").read_text().replace("\\\n", "\n")
    for result, name, parameters in re.findall(r"X\((\w+ ?\*?),\s*(acl\w+),\s*\(([^)]*)\)\)", text):
        yield name, f"{result} (*)({' '.join(parameters.split())})"


def simulated_functions():
    """Yields (symbol, parameters) for each function that the simulator exports."""
    for file in sorted((HERE / "sim/src/exports").glob("*.rs")):
        text = file.read_text()
        for name, parameters in re.findall(r'pub extern "C" fn (\w+)\(([^)]*)\)', text):
            if not name.startswith("ascend_sim_"):
                yield name, parameters
        extra = "workspace_bytes: Out<u64>, executor: Out<Handle>"
        for name, parameters in re.findall(r"\bop!\((aclnn\w+),\s*aclnn\w+,\s*\(([^)]*)\)", text):
            yield name, f"{parameters}, {extra}"
        # One macro defines both versions of attention.
        found = re.search(r"op!\(\$query_fn.*?\((query: .*?)\), \{", text, re.S)
        if found:
            for name, rope in re.findall(r"attention_op!\(\s*(\w+GetWorkspaceSize),\s*\w+,\s*\(([^)]*)\)\s*\)", text):
                names = [n.strip() for n in rope.split(",") if n.strip()]
                inner = ", ".join(f"{n}: Handle" for n in names) + (", " if names else "")
                yield name, re.sub(r"\$\(\$rope: Handle,\)\* ", inner, found.group(1)) + f", {extra}"


def travel(parameters: str) -> str:
    kinds = []
    for parameter in filter(None, (p.strip() for p in " ".join(parameters.split()).split(","))):
        rust = parameter.split(":", 1)[1].strip()
        size, floating = (8, 0) if re.match(r"(Out|In)<", rust) else SIMULATED[rust]
        kinds.append(f"travels<{size}, {'true' if floating else 'false'}>")
    return f"std::tuple<{', '.join(kinds)}>"


def compile_checks(name: str, source: str, includes, folder: pathlib.Path) -> int:
    file = folder / f"{name}.cpp"
    file.write_text(source)
    flags = [flag for include in includes for flag in ("-isystem", str(include))]
    done = subprocess.run(["g++", "-std=c++17", "-fsyntax-only", *flags, str(file)], capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(f"{name}:\n{done.stderr}\n")
    return done.returncode


def has(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def wheel_headers(version: str, folder: pathlib.Path):
    """Returns the include folders of the runtime and the collectives, and the bytes of the wheel's library."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder),
         f"torch-npu=={version}"],
        check=True,
    )
    wheel = next(folder.glob("torch_npu-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        headers = [n for n in archive.namelist() if "/third_party/" in n and n.endswith(".h")]
        archive.extractall(folder / "wheel", headers)
        library = next(n for n in archive.namelist() if n.endswith("libtorch_npu.so"))
        binary = archive.read(library)
    third_party = folder / "wheel/torch_npu/include/third_party"
    return [third_party / "acl/inc", third_party / "hccl/inc", third_party.parent], binary


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--torch-npu", default="2.7.1", help="version of the wheel whose headers are used")
    options.add_argument(
        "--cann", default=os.environ.get("ASCEND_HOME_PATH"), help="folder of an installed toolkit whose headers are used")
    options = options.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        # 1. Compare the shim's prototypes with the simulator's operations. This needs no vendor files.
        simulated = dict(simulated_functions())
        lines = [PRELUDE, f'#include "{HERE}/shim/functions.h"']
        shim = dict(shim_functions())
        for symbol, prototype in shim.items():
            if symbol not in simulated:
                failures += 1
                sys.stderr.write(f"the simulator does not export {symbol}\n")
                continue
            expected = travel(simulated[symbol])
            lines.append(f'static_assert(std::is_same_v<travel<{prototype}>::type, {expected}>, "{symbol}");')
        failures += compile_checks("simulator_operations", "\n".join(lines), [], folder)
        print(f"{len(shim)} functions of the shim compared with the simulator's")

        # 2. Compare runtime and collectives with the wheel's headers.
        includes, binary = wheel_headers(options.torch_npu, folder)
        if options.cann:
            includes = [pathlib.Path(options.cann) / "include"]
        headers = [f for root in includes for pattern in ("acl/*.h", "acl/error_codes/*.h", "hccl/*.h")
                   for f in root.glob(pattern)]
        text = "\n".join(header.read_text(errors="replace") for header in headers)
        lines = [PRELUDE, '#include "acl/acl.h"', '#include "hccl/hccl.h"', '#include "hccl/hccl_types.h"']
        absent, checked = [], 0
        for symbol, prototype in declared_functions():
            if not has(text, symbol):
                absent.append(symbol)
                continue
            checked += 1
            lines.append(f'static_assert(same<decltype(&{symbol}), {prototype}>, "{symbol}");')
            if symbol in simulated:
                expected = travel(simulated[symbol])
                lines.append(
                    f'static_assert(std::is_same_v<travel<decltype(&{symbol})>::type, {expected}>, "simulated {symbol}");')
            elif not symbol.startswith("aclGetRecent"):
                failures += 1
                sys.stderr.write(f"the simulator does not export {symbol}\n")
        values = 0
        for constant, value in constants():
            if not has(text, constant):
                absent.append(constant)
                continue
            values += 1
            lines.append(f'static_assert((long long)({constant}) == {value}, "{constant}");')
        lines.append('static_assert(sizeof(aclrtUtilizationInfo) == 24, "aclrtUtilizationInfo");')
        lines.append('static_assert(sizeof(HcclRootInfo) == 4108, "HcclRootInfo");')
        failures += compile_checks("runtime", "\n".join(lines), includes, folder)
        print(f"{checked} functions and {values} constants compared with torch-npu {options.torch_npu}")
        print("not declared in these headers: " + ", ".join(absent))

        # 3. Operations: compare prototypes if a toolkit is installed, otherwise only names.
        operations = [symbol for symbol in shim if symbol.startswith("aclnn")]
        if options.cann:
            root = pathlib.Path(options.cann) / "include"
            files = sorted(root.glob("aclnnop/aclnn_*.h"))
            known = {f: f.read_text(errors="replace") for f in files}
            lines = [PRELUDE, '#include "aclnn/acl_meta.h"', '#include "aclnn/aclnn_base.h"']
            for symbol in operations:
                home = next((f for f, t in known.items() if has(t, symbol)), None)
                if home is None:
                    print(f"no header declares {symbol}")
                    continue
                lines.append(f'#include "aclnnop/{home.name}"')
                lines.append(f'static_assert(same<decltype(&{symbol}), {shim[symbol]}>, "{symbol}");')
            failures += compile_checks("operations", "\n".join(lines), [root], folder)
        else:
            names = {symbol.removesuffix("GetWorkspaceSize") for symbol in operations}
            unknown = sorted(n for n in names if re.search(rf"\b{n}\b".encode(), binary) is None)
            print(f"{len(names) - len(unknown)} of {len(names)} operations are named in the wheel's library; missing: "
                  + (", ".join(unknown) or "none"))
    print("mismatches found" if failures else "no mismatch")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
