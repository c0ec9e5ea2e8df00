import sys

if sys.argv[:1] == ["-m"]:  # `python -m` is looking for a program of this package, with the working directory first
    if not sys.flags.safe_path:
        del sys.path[0]
    from schemas.importpath import keep_working_directory_out

    keep_working_directory_out()
