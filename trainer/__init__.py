import sys

if sys.argv[:1] == ["-m"]:  # `python -m` is looking for a program of this package, with the working directory first
    if not sys.flags.safe_path:
        del sys.path[0]
    from schemas import remove_working_directory

    remove_working_directory()
    from schemas.cli.starting import begin_silently, explain_missing_libraries

    explain_missing_libraries()
    begin_silently()
