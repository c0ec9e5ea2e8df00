from latentpress import main

main()
