# The same as ./demo and ./test, for those who have make.
.PHONY: demo test
demo:
	@./demo $(if $(PROMPT),"$(PROMPT)")

test:
	@./test
