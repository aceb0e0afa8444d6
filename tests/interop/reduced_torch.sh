# Sourced by the scripts that create virtual environments with torch for a CPU.
#
# torch's Linux wheel depends on some 4 GB of GPU libraries and links against them. The reduced install leaves them out
# (pip install --no-deps), satisfies the linker with links to torch's own libc10.so, and binds symbols lazily, so that
# unused symbols are never looked up.

# add_stand_ins PYTHON: makes torch importable in that environment without the GPU libraries.
add_stand_ins() {
    local packages libraries name
    packages=$("$1" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    libraries=$packages/torch/lib
    [[ -f $libraries/libtorch_cuda.so ]] || return 0
    for name in libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcufile.so.0 \
        libcurand.so.10 libcusolver.so.12 libcusparse.so.12 libcusparseLt.so.0 libnccl.so.2 \
        libnvrtc.so.13; do
        ln -s libc10.so "$libraries/$name"
    done
    echo 'import os, sys; sys.setdlopenflags(os.RTLD_LAZY)' >"$packages/lazy_binding.pth"
}
